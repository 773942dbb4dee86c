"""The engine that runs ONNX graphs: ``export`` writes the planned model as graphs (with torch), ``engine`` runs
them."""
