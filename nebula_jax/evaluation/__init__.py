"""How good a model is, on text it was not trained on."""
