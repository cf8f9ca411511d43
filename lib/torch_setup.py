"""What must be set before torch computes or compiles anything, to keep it from errors.

The import sets what every program needs, `mend_compiler` what those need that compile.
"""

import torch

# The functions that torch takes from MKL: IMPLEMENT_VML_MKL in torch/include/ATen/cpu/vml.h.
VECTOR_FUNCTIONS = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc"


def warm_up_vector_functions():
    """Call each of MKL's vector functions once, from one thread.

    MKL 2024 sets up a vector function during its first call. A thread that calls the function
    meanwhile gets errors up to 1.5e-4 on Intel CPUs, without a message:
    https://github.com/pytorch/pytorch/issues/188792
    """
    for dtype in (torch.float32, torch.float64):
        x = torch.full((8,), 0.5, dtype=dtype, device="cpu")  # too few for a second thread
        for name in VECTOR_FUNCTIONS.split():
            getattr(torch, name)(x)


def mend_compiler():
    """Switch off an optimization of torch.compile that gives wrong results on a CPU with vectors.

    torch 2.13 splits a loop in two where its index is divided by a number. If the number does not
    divide the loop's length, the last entries are left out.
    """
    from torch._inductor.codegen.cpp import CppScheduling  # few runs need it

    CppScheduling.try_loop_split = lambda self, nodes: nodes


warm_up_vector_functions()
# a GPU would add up parts of a product in bf16
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
# fp32 is fp32: torch allows TF32 in convolutions, and NVIDIA's containers in products
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
