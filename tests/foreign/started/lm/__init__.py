"""A language model of transformers from a configuration in JSON, in a package."""
