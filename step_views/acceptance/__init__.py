"""The acceptance run of a GPU: parts that each prove a path of foretrace on it, judged point by point.

``run`` goes through the parts of ``parts``, each in a process of its own (``worker``); a part yields ``points``.
"""
