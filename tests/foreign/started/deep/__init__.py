"""Packages in a package: a recipe imports two levels out, and takes a JSON file by its path from where it is run."""
