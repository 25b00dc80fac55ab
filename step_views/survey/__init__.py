"""Surveys: the facts of many jobs as one table, a row a job, resumed where it was; and what a table says of a fleet."""
