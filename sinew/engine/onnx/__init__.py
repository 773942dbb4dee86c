"""ONNX Runtime: ``export`` (with torch) writes the planned model as graphs, ``engine`` (without) runs them."""
