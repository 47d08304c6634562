"""The one vocabulary of collectives: kinds, calls and ranks. It imports neither torch nor anything else of ours."""
