"""CUDA: batches on the GPU before the loop asks for them.

loader -> [a thread: pinned memory -> the GPU, on a stream of its own] -> event -> the loop
"""

from enqueuer.adapters.cuda.loader import CudaDataLoader

__all__ = ["CudaDataLoader"]
