"""Traces of mixture-of-experts diffusion models: format, capture, models, checks.

Shape letters used in comments everywhere: L MoE layers, E experts, K experts of a token, T tokens of a pass,
R requests of a pass, F forward passes of a run, C slots of a layer, G transfers of a layer execution.
"""
