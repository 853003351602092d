"""Training of the small GLM-5.3-Flash demo checkpoint under ``deployments/demo/glm``.

Owns the data generators, the training model, the training phases, the evaluation and the model
card. It shares no code with the serving engine on purpose: the evaluation is an independent
statement about the weights.
"""
