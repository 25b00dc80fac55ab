"""Models learned from measurements: boosted trees on physically meant features, and Gaussian processes for few calls.

``BoostedModel`` (``boosted``) and ``GaussianModel`` (``gaussian``) price the calls of one family; ``fit`` and
``gaussian`` fit them. Both are plain arrays, evaluated by foretrace's own code.
"""
