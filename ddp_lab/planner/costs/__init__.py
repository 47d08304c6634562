"""What operators and collectives cost: from tables of hardware, or from measurements."""
