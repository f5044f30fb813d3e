"""The ONNX Runtime custom-op libraries."""

from quantmoe.custom_ops import library_file


def library_path() -> str:
    """Path of ``libquantmoe_ort.so``, for ``SessionOptions.register_custom_ops_library``.

    QUANTMOE_LIBRARY names another build of it (sanitizers).

    Raises:
        FileNotFoundError: it is not there.
    """
    return library_file(__name__, "libquantmoe_ort.so", "QUANTMOE_LIBRARY")


def cuda_library_path() -> str:
    """Path of ``libquantmoe_ort_cuda.so``, the operator for the CUDA execution provider.

    QUANTMOE_ORT_CUDA_LIBRARY names another build of it.

    Raises:
        FileNotFoundError: this installation was made without CUDA.
    """
    return library_file(__name__, "libquantmoe_ort_cuda.so", "QUANTMOE_ORT_CUDA_LIBRARY")
