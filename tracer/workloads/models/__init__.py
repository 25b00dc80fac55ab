"""The models of the suite, one file each; every one imports torch and is imported only when it is built."""
