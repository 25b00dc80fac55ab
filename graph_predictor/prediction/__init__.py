"""The parts of a prediction: steps repeated, work described, priced, simulated and explained. See
``graph_predictor.prediction.predictor``."""
