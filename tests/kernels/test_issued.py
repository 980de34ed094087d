"""PTX that runs on a CPU, as `benchmarks.issued` counts instructions."""

from __future__ import annotations

import pytest
import torch
from benchmarks.issued import Memory, Program

# Each of 64 threads adds up its warp's numbers, halves the sum until it is at most 1, and stores that.
HALVED = """
.visible .entry halved(
	.param .u64 .ptr .global .align 1 halved_param_0,
	.param .u32 halved_param_1
)
.reqntid 64
{
	.reg .pred 	%p<3>;
// %bb.0:
	ld.param.b64 	%rd1, [halved_param_0];
	ld.param.b32 	%r9, [halved_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	setp.lt.u32 	%p1, %r1, %r9;
	@%p1 ld.global.b32 { %r2 }, [ %rd3 + 0 ];
	@!%p1 mov.u32 %r2, 0x0;
	shfl.sync.bfly.b32 	%r3, %r2, 16, 31, -1;
	add.f32 	%r2, %r2, %r3;
	shfl.sync.bfly.b32 	%r3, %r2, 8, 31, -1;
	add.f32 	%r2, %r2, %r3;
	shfl.sync.bfly.b32 	%r3, %r2, 4, 31, -1;
	add.f32 	%r2, %r2, %r3;
	shfl.sync.bfly.b32 	%r3, %r2, 2, 31, -1;
	add.f32 	%r2, %r2, %r3;
	shfl.sync.bfly.b32 	%r3, %r2, 1, 31, -1;
	add.f32 	%r2, %r2, %r3;
$L__BB0_1:
	mul.f32 	%r2, %r2, 0f3F000000;
	setp.gt.f32 	%p2, %r2, 0f3F800000;
	@%p2 bra 	$L__BB0_1;
	st.global.b32 [ %rd3 + 0 ], { %r2 };
	ret;
}
"""
STRAIGHT, LOOP = 20, 3  # instructions


def test_counts_and_results() -> None:
    x = torch.full((64,), 0.25)
    issued = Program(HALVED).run(0, [x.data_ptr(), 64], Memory([x]))
    assert issued == STRAIGHT + 3 * LOOP and torch.equal(x, torch.ones(64))  # 8 is halved three times


def test_what_does_not_run_is_an_error() -> None:
    x = torch.full((64,), 0.25)
    with pytest.raises(RuntimeError, match="threads part"):  # the second warp has only eight numbers
        Program(HALVED).run(0, [x.data_ptr(), 40], Memory([x]))
    with pytest.raises(MemoryError):
        Program(HALVED).run(0, [x.data_ptr(), 64], Memory([torch.ones(64)]))
    with pytest.raises(NotImplementedError, match=r"sin\.approx\.f32"):
        Program(HALVED.replace("mul.f32", "sin.approx.f32")).run(0, [x.data_ptr(), 64], Memory([x]))
