"""The fused choice of tokens on GPUs, in Triton: logits are read once, and a few times where top_k or top_p act.

There is no sort. The best token is chosen from all. If it turns out to be dropped, so are all less probable ones, and
the best is chosen from the others. Sums are integers and float operations are IEEE's, so all devices choose alike.

First the scores of each block are bounded, by as many programs as there are blocks. What follows has a program a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_MOST_BLOCKS = 1024  # of a row, whose halves' bounds are in registers
_LOG2_E = tl.constexpr(1.4426950408889634)
_SLACK = tl.constexpr(2.0**-25)  # this and `_weights` as in decoding/sampling/processors.py
_PIVOTS = tl.constexpr(8)
_NOTHING = tl.constexpr(float("-inf"))


def choose(
    logits: Tensor, settings: Tensor, count: int, token_ids: Tensor | None = None, *, block: int = _BLOCK
) -> tuple[Tensor, Tensor]:
    """Return the best columns and their scores, both [N, count]; see `Choose`.

    logits: [N, V] float32; settings: [N, 6] float64; token_ids: [V] int64 or None; block: how many logits are in
    registers at a time.
    """
    rows, vocab_size = logits.shape
    block = min(max(block, triton.next_power_of_2(-(-vocab_size // _MOST_BLOCKS))), triton.next_power_of_2(vocab_size))
    half = max(block // 2, 1)  # smaller blocks are bounded more tightly
    blocks = triton.cdiv(vocab_size, half)
    tokens = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    bounds = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    has_ids = token_ids is not None
    ids = tokens if token_ids is None else token_ids
    with torch.cuda.device_of(logits):
        _bound[(rows, blocks)](
            *(logits, settings, ids, bounds, vocab_size),
            BLOCK=half,
            HAS_IDS=has_ids,
            num_warps=8,
            enable_fp_fusion=False,
        )
        _choose[(rows,)](
            *(logits, settings, ids, bounds, tokens, scores, vocab_size, blocks, count),
            HAS_IDS=has_ids,
            BLOCK=block,
            HALF=half,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=16,
            enable_fp_fusion=False,
        )
    return tokens, scores


@triton.jit
def _bound(
    logits: tl.tensor,  # [N, V] float32
    settings: tl.tensor,  # [N, 6] float64
    ids: tl.tensor,  # [V] int64
    bounds: tl.tensor,  # [N, blocks] float32
    vocab_size: tl.tensor,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Estimate the best score of a block of one row, dropped tokens included; ∞ if one is NaN.

    The grid is [N, blocks].
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = settings + row * 6
    temperature = tl.load(own).to(tl.float32)
    is_random = temperature != 0.0
    temperature = tl.where(is_random, temperature, 1.0)
    token, score = _scaled(logits + row * vocab_size, block * BLOCK, vocab_size, temperature, BLOCK)
    if is_random:
        first_key, second_key = tl.load(own + 4).to(tl.int32), tl.load(own + 5).to(tl.int32)
        score += _rough_noise(_random_bits(token, ids, vocab_size, first_key, second_key, HAS_IDS))
    tl.store(bounds + row * tl.num_programs(1) + block, tl.max(tl.where(score == score, score, float("inf"))))


@triton.jit(do_not_specialize=["count"])
def _choose(
    logits: tl.tensor,  # [N, V] float32
    settings: tl.tensor,  # [N, 6] float64
    ids: tl.tensor,  # [V] int64
    bounds: tl.tensor,  # [N, blocks] float32
    tokens: tl.tensor,  # [N, count] int64
    scores: tl.tensor,  # [N, count] float32
    vocab_size: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Choose the tokens of one row. The grid is [N]."""
    row = tl.program_id(0).to(tl.int64)
    line, own = logits + row * vocab_size, settings + row * 6
    block = tl.arange(0, BLOCKS)
    bound = tl.load(bounds + row * blocks + block, mask=block < blocks, other=float("-inf"))  # [BLOCKS]
    temperature = tl.load(own).to(tl.float32)
    is_random = temperature != 0.0
    temperature = tl.where(is_random, temperature, 1.0)
    is_sound = tl.max(bound) < float("inf")
    is_cut = is_random & is_sound
    top_k = tl.where(is_cut, tl.load(own + 1), 0.0).to(tl.int32)
    top_p = tl.where(is_cut, tl.load(own + 2), 1.0)
    least = tl.where(is_cut, tl.load(own + 3), 0.0) * 1099511627776.0  # min_p as a weight
    first_key, second_key = tl.load(own + 4).to(tl.int32), tl.load(own + 5).to(tl.int32)

    has_top_k, has_top_p = top_k > 0, top_p < 1.0
    peak = 0.0
    floor = float("-inf")  # lower logits are dropped
    wanted = tl.full([], 1, tl.int64)  # a token is dropped if those before it weigh as much
    if has_top_k | has_top_p | (least > 0.0):
        peak, lowest, finite = _range(line, vocab_size, temperature, BLOCK)
        if has_top_p:
            if has_top_k & (top_k < finite):
                floor = _kth_largest(line, vocab_size, temperature, top_k, peak, lowest, BLOCK // 4)
            total, _ = _above(line, vocab_size, temperature, peak, floor, -1, BLOCK)
            wanted = total - ((1.0 - top_p + _SLACK) * total.to(tl.float64)).to(tl.int64)
            wanted = tl.maximum(wanted, 1)

    dropped = float("-inf")
    dropped_token = -1  # it is dropped, and so is all before it in the order of logits, then tokens
    last_score = float("inf")
    last_token = -1
    for rank in range(count):
        token, score = _best(
            *(line, ids, bound, vocab_size, temperature, is_random, first_key, second_key, peak, floor, least),
            *(dropped, dropped_token, last_score, last_token, HAS_IDS, HALF, BLOCKS),
        )
        searching = (has_top_k | has_top_p) & (score > _NOTHING)
        while searching:
            logit = tl.math.div_rn(tl.load(line + token), temperature)
            weight, larger = _above(line, vocab_size, temperature, peak, logit, token, BLOCK)
            searching = (has_top_p & (weight >= wanted)) | (has_top_k & (larger >= top_k))
            if searching:
                dropped = logit
                dropped_token = token
                token, score = _best(
                    *(line, ids, bound, vocab_size, temperature, is_random, first_key, second_key, peak, floor, least),
                    *(dropped, dropped_token, last_score, last_token, HAS_IDS, HALF, BLOCKS),
                )
                searching = score > _NOTHING
        tl.store(tokens + row * count + rank, token.to(tl.int64))
        tl.store(scores + row * count + rank, tl.where(is_sound, score, float("-inf")))
        last_score = score
        last_token = token


@triton.jit
def _best(
    line: tl.tensor,  # [V] float32
    ids: tl.tensor,  # [V] int64
    bound: tl.tensor,  # [BLOCKS] float32
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    is_random: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    least: tl.tensor,  # weight
    dropped: tl.tensor,
    dropped_token: tl.tensor,
    last_score: tl.tensor,
    last_token: tl.tensor,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the token with the best score below the last one's, and its score; token 0 and −∞ if there is none.

    Blocks are read in the order of their bounds, until none may hold the best. Double precision is for few of them.
    """
    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.full([], 0, tl.int32)
    block = tl.arange(0, BLOCKS)
    highest = tl.max(bound)
    while highest > best - (tl.abs(best) * 1e-6 + 1e-4):
        number = tl.min(tl.where(bound == highest, block, BLOCKS))
        bound = tl.where(block == number, float("-inf"), bound)
        highest = tl.max(bound)
        token, logit = _scaled(line, number * BLOCK, vocab_size, temperature, BLOCK)
        may_stay = (token < vocab_size) & (logit >= floor)
        may_stay = may_stay & ((logit > dropped) | ((logit == dropped) & (token > dropped_token)))
        if least > 0.0:
            may_stay = may_stay & (_weights(logit, peak).to(tl.float64) >= least)
        rough = logit
        if is_random:
            rough = logit + _rough_noise(_random_bits(token, ids, vocab_size, first_key, second_key, HAS_IDS))
        if tl.max(tl.where(may_stay, rough, float("-inf"))) > best - (tl.abs(best) * 1e-6 + 1e-4):
            score = logit
            if is_random:
                score = logit + _noise(_random_bits(token, ids, vocab_size, first_key, second_key, HAS_IDS))
            is_next = (score < last_score) | ((score == last_score) & (token > last_token))
            score = tl.where(may_stay & is_next, score, float("-inf"))
            block_best = tl.max(score)
            block_token = tl.min(tl.where(score == block_best, token, vocab_size))
            if (block_best > best) | ((block_best == best) & (block_token < best_token)):
                best = block_best
                best_token = block_token
    return best_token, best


@triton.jit
def _above(
    line: tl.tensor,  # [V] float32
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    logit: tl.tensor,
    token: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the weight of the tokens above this one, by logits, then ids; and how many logits are larger."""
    weight = tl.zeros([BLOCK], tl.int64)
    larger = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        other, value = _scaled(line, start, vocab_size, temperature, BLOCK)
        is_above = (value > logit) | ((value == logit) & (other > token))
        weight += tl.where(is_above, _weights(value, peak), 0)
        larger += (value > logit).to(tl.int32)
    return tl.sum(weight), tl.sum(larger)


@triton.jit
def _range(
    line: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the largest logit, the smallest finite one, and how many are finite."""
    largest = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    finite = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        _, logit = _scaled(line, start, vocab_size, temperature, BLOCK)
        is_finite = logit > float("-inf")
        largest = tl.maximum(largest, logit)
        smallest = tl.minimum(smallest, tl.where(is_finite, logit, float("inf")))
        finite += is_finite.to(tl.int32)
    return tl.max(largest), tl.min(smallest), tl.sum(finite)


@triton.jit
def _kth_largest(
    line: tl.tensor,  # [V] float32, more than k of them finite
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    k: tl.tensor,
    peak: tl.tensor,
    lowest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return a bound that the k largest logits and ties with the k-th reach, and no others.

    An interval that holds the k-th is cut into eighths in each pass, and at the largest logit below its end, which
    finds the k-th among ties.
    """
    low = lowest  # at least k logits reach it
    high = peak  # fewer than k reach it, or else the first cut is the bound
    cut = peak
    searching = True
    while searching:
        index = tl.arange(0, _PIVOTS)
        pivots = tl.where(index == 0, cut, low + (high - low) * (index.to(tl.float32) / _PIVOTS))
        reached = tl.zeros([BLOCK, _PIVOTS], tl.int32)
        below = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            _, logit = _scaled(line, start, vocab_size, temperature, BLOCK)
            reached += (logit[:, None] >= pivots[None, :]).to(tl.int32)
            below = tl.maximum(below, tl.where(logit < high, logit, float("-inf")))
        counts, next_cut = tl.sum(reached, 0), tl.max(below)
        are_enough = counts >= k
        reach_cut = tl.max(tl.where(index == 0, counts, 0)) >= k
        exactly = tl.max((counts == k).to(tl.int32)) > 0
        low = tl.maximum(low, tl.max(tl.where(are_enough, pivots, float("-inf"))))
        high = tl.minimum(high, tl.min(tl.where(are_enough, float("inf"), pivots)))
        cut = next_cut
        searching = (reach_cut == 0) & (exactly == 0)
    return low


@triton.jit
def _scaled(
    line: tl.tensor, start: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return tokens from `start` on, and their logits over the temperature, −∞ beyond the vocabulary: [BLOCK] each."""
    token = start + tl.arange(0, BLOCK)
    logit = tl.load(line + token, mask=token < vocab_size, other=float("-inf"))
    return token, tl.math.div_rn(logit, temperature)


@triton.jit
def _weights(logit: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Return probabilities relative to the most probable token's, which is 2⁴⁰; int64."""
    exponent = tl.maximum((logit - peak) * _LOG2_E, -64.0)
    whole = tl.floor(exponent)
    fraction = exponent - whole
    mantissa = fraction * 0.0002161291631637141 + 0.0012467845808714628
    mantissa = mantissa * fraction + 0.009675451554358006
    mantissa = mantissa * fraction + 0.055485282093286514
    mantissa = mantissa * fraction + 0.2402293086051941
    mantissa = mantissa * fraction + 0.6931470632553101
    mantissa = mantissa * fraction + 1.0
    return ((mantissa * 8388608.0).to(tl.int64) << 17) >> tl.minimum((0.0 - whole).to(tl.int64), 63)


@triton.jit
def _random_bits(
    token: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    HAS_IDS: tl.constexpr,
) -> tl.tensor:
    """Return the 31 bits of decoding/sampling/noise.py, int32."""
    if HAS_IDS:
        token = tl.load(ids + token, mask=token < vocab_size, other=0)
    bits = _mix((token.to(tl.uint32) * 0x9E3779B9) ^ first_key.to(tl.uint32, bitcast=True))
    bits = _mix(bits + second_key.to(tl.uint32, bitcast=True))
    return (bits >> 1).to(tl.int32)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _noise(bits: tl.tensor) -> tl.tensor:
    """Return Gumbel noise, rounded from double precision. The complement of the uniform number is exact in it."""
    complement = ((2147483647 - bits).to(tl.float64) + 0.5) * 4.656612873077393e-10
    return (0.0 - tl.log(0.0 - tl.log(complement))).to(tl.float32)


@triton.jit
def _rough_noise(bits: tl.tensor) -> tl.tensor:
    """Return the same, within 0.00003."""
    uniform = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10
    complement = ((2147483647 - bits).to(tl.float32) + 0.5) * 4.656612873077393e-10
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333333333))
    return 0.0 - tl.log(tl.where(uniform < 0.0078125, series, 0.0 - tl.log(complement)))
