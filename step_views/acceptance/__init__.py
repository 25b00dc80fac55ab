"""The acceptance run of a GPU: parts that each test a path of foretrace on it, judged point by point.

``run`` runs the parts of ``parts``, each in its own process (``worker``). A part yields ``points``.
"""
