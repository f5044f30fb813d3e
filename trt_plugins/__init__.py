"""The TensorRT plug-in library."""

from quantmoe.custom_ops import library_file


def library_path() -> str:
    """Return the path of ``libquantmoe_trt.so``, for TensorRT's plug-in registry, trtexec and ONNX Runtime.

    QUANTMOE_TRT_LIBRARY names another build of it.

    Raises:
        FileNotFoundError: the package quantmoe-cuda is not installed.
    """
    return library_file(__name__, "libquantmoe_trt.so", "QUANTMOE_TRT_LIBRARY")
