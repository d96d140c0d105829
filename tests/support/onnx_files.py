"""Small networks as ONNX files."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTS = np.random.default_rng(3).standard_normal((5, 3, 3, 3)).astype(np.float32)


def small_onnx(path: Path, shape: Any = ("picture", 3, 16, 16), end: str = "", weights: np.ndarray = WEIGHTS) -> str:
    """Writes convolution, mean over the picture, and `end`: another operator, or nothing."""
    nodes = [
        helper.make_node("Conv", ["pictures", "weights"], ["maps"]),
        helper.make_node("GlobalAveragePool", ["maps"], ["means"]),
        helper.make_node("Flatten", ["means"], ["features"]),
    ]
    given = [helper.make_tensor_value_info("pictures", TensorProto.FLOAT, shape)]
    output, kind, output_shape = "features", TensorProto.FLOAT, [shape[0], len(weights)]
    if end == "maps":
        output, output_shape = "means", [shape[0], len(weights), 1, 1]
    elif end == "two inputs":
        given.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))
        nodes.append(helper.make_node("Add", ["features", "more"], ["found"]))
        output = "found"
    elif end == "ReduceSum":
        nodes.append(helper.make_node("ReduceSum", ["features"], ["found"], keepdims=0))
        output, output_shape = "found", []
    elif end == "ArgMax":
        nodes.append(helper.make_node("ArgMax", ["features"], ["found"], axis=1))
        output, kind, output_shape = "found", TensorProto.INT64, [shape[0], 1]
    elif end:
        nodes.append(helper.make_node(end, ["features"], ["found"]))
        output = "found"
    found = [helper.make_tensor_value_info(output, kind, output_shape)]
    graph = helper.make_graph(nodes, "small", given, found, [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return f"onnx:{path}"
