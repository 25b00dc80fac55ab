"""The parts of a prediction: steps repeated, work described, priced, simulated and told. See
``graph_predictor.prediction.predictor``."""
