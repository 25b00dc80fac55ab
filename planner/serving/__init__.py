"""Steps of a served decoder, priced as a plan's are, and what a server of requests makes of them."""
