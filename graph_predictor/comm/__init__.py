"""Communication: the price of a collective, what a job communicates and how that could be tuned."""
