"""A step on a cluster, from one GPU's: parallel plans, their memory, their schedule and their collectives."""
