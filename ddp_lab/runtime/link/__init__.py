"""A link that anyone can slow down: a process group over Gloo that delivers no earlier than a link of a rate could."""
