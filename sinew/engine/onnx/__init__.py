"""The engine that runs ONNX graphs. ``export`` writes the rewritten model as graphs, which needs torch. ``engine``
runs the graphs without torch.
"""
