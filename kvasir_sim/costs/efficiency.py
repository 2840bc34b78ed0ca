"""What kernels reach of a device's peaks, fitted; and where each number comes from.

`python -m kvasir_sim.fit` prints these numbers again from the measured tables of an RTX PRO 6000
(vLLM 0.19, bfloat16); `docs/cost_models.md` has the residuals. On another device they are a
transfer, and the cost model then says *assumed*.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the device's peaks, and floors in seconds.

    Attributes:
        matrix_memory: Of bandwidth, reading weights. Fitted to the output matrix, whose 622 MB no
            cache holds. (The profiler ran qkv and o over and over: their weights stayed in the
            128 MB cache, and a fit to them gives three times the bandwidth that there is.)
        matrix_flops: Of peak FLOP/s, dense matrices of many rows. Fitted to qkv and o.
        kernel_s: Floor of one small kernel: the smallest that the table gives.
        expert_memory, expert_flops, expert_s: The same for one layer of routed experts, whose
            floor covers its several kernels.
        decode_memory, decode_s: Attention of decodes alone: KV over bandwidth, and a floor.
        prompt_flops, prompt_memory, prompt_s: Attention of a micro-batch with a prompt chunk.
        tile_positions: What starting a tile costs, as so many positions of KV.
        empty_tile_s: A tile that finds nothing to do.
        sampler_s, sampler_memory: Sampling: floor, and logits over bandwidth.
        pass_s: Per micro-batch and stage, what no kernel covers (assumed, not fitted).
    """

    matrix_memory: float = 0.91
    matrix_flops: float = 0.62
    kernel_s: float = 1.84e-6
    expert_memory: float = 0.86
    expert_flops: float = 0.38
    expert_s: float = 4.4e-6
    decode_memory: float = 0.83
    decode_s: float = 1.2e-5
    prompt_flops: float = 0.556
    prompt_memory: float = 0.617
    prompt_s: float = 2.2e-6
    tile_positions: float = 180.0
    empty_tile_s: float = 2.0e-9
    sampler_memory: float = 0.83
    sampler_s: float = 9.4e-6
    pass_s: float = 1.0e-4


FITTED_DEVICE = "rtx-pro-6000"
FITTED_DTYPE = "bfloat16"
FITTED = Efficiency()
