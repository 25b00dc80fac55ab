MODELS = {}


def register_model(function):
    MODELS[function.__name__] = function
    return function
