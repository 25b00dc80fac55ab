from .registry import MODELS


def create_model(name, **settings):
    return MODELS[name](**settings)
