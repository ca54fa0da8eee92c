#!/usr/bin/env python3
"""Draft stages for tests/fixtures/deepseek_v4-a in the two published layouts of DeepSeek-V4, and what they propose.

usage: make_stages_fixtures.py        writes tests/fixtures/deepseek_v4-stages/{dspark,mtp}.safetensors and golden files beside them

The target's hidden states and tokens are transformers' (float32, eager). The stages are computed here, in plain PyTorch: whole histories,
one sequence, every row of a window anew. dspark: as in V4-0731, two stages, a block of 5; mtp: as in the preview, one layer for one token
more. Matrices are stored as published: e4m3 with an E8M0 scale for 128 x 128, experts as packed e2m1 with one for 32 inputs of a row.

golden: input_ids [T]; greedy [N], what decoding without drafts emits; main [T, H] (dspark) context rows in front of each stage's wkv;
of each of R rounds anchor, position, accepted [R], ids [R, B], logits [R, B, V], conf [R, B] (dspark), hidden [R, B, H] in front of the norm.
"""
import json, os
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
BASE, OUT = os.path.join(HERE, "fixtures/deepseek_v4-a"), os.path.join(HERE, "fixtures/deepseek_v4-stages")
C = json.load(open(os.path.join(BASE, "config.json")))
H, S, D, N, Q, V = C["hidden_size"], C["hc_mult"], C["head_dim"], C["num_attention_heads"], C["q_lora_rank"], C["vocab_size"]
G, O, I, E, K = C["o_groups"], C["o_lora_rank"], C["moe_intermediate_size"], C["n_routed_experts"], C["num_experts_per_tok"]
EPS, HC, WINDOW, TURNED, RANK, BLOCK, NOISE, TAPS = C["rms_norm_eps"], C["hc_eps"], C["sliding_window"], C["qk_rope_head_dim"], 16, 5, V - 20, [2, 4, 5]
PROMPT, COUNT = 40, 30
E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])

# ---- stored forms, and the values they stand for

def store_fp8(out, name, w):
    scale = 2.0 ** torch.ceil(torch.log2(w.abs().max() / 448))
    codes = (w / scale).to(torch.float8_e4m3fn)
    out[name + ".weight"], out[name + ".scale"] = codes, torch.full([-(-n // 128) for n in w.shape], scale.item()).to(torch.float8_e8m0fnu)
    return codes.float() * scale

def store_fp4(out, name, w):
    parts = w.unflatten(1, (-1, 32))
    scale = 2.0 ** torch.ceil(torch.log2(parts.abs().amax(-1, keepdim=True) / 6))
    near = ((parts / scale).abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (near | (parts < 0).long() << 3).flatten(1).to(torch.uint8)
    out[name + ".weight"] = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    out[name + ".scale"] = scale.squeeze(-1).to(torch.float8_e8m0fnu)
    return (E2M1[near] * parts.sign() * scale).flatten(1)

def store_bf16(out, name, w):
    out[name] = w.bfloat16()
    return out[name].float()

class Weights(dict):
    def __init__(self, generator):
        self.stored, self.g = {}, generator
    def random(self, *shape): return torch.randn(shape, generator=self.g)
    def matrix(self, name, rows, cols, store=store_fp8):
        self[name] = store(self.stored, name, self.random(rows, cols) * 1.6 / cols ** 0.5)
    def norm(self, name, n): self[name] = store_bf16(self.stored, name + ".weight", 1 + 0.2 * self.random(n))
    def floats(self, name, values): self[name] = store_bf16(self.stored, name, values)
    def hyper(self, name, n, scales):
        self.floats(name + "_fn", 0.15 * self.random(n, S * H))
        self.floats(name + "_base", 0.5 * self.random(n))
        self.floats(name + "_scale", 1 + 0.3 * self.random(scales))
    def layer(self, p):
        a = p + ".attn"
        for name, rows, cols in (("wq_a", Q, H), ("wq_b", N * D, Q), ("wkv", D, H), ("wo_a", G * O, N * D // G), ("wo_b", H, G * O)):
            self.matrix(f"{a}.{name}", rows, cols)
        for name, n in ((a + ".q_norm", Q), (a + ".kv_norm", D), (p + ".attn_norm", H), (p + ".ffn_norm", H)): self.norm(name, n)
        self.floats(a + ".attn_sink", 0.5 + self.random(N))
        self.hyper(p + ".hc_attn", (2 + S) * S, 3); self.hyper(p + ".hc_ffn", (2 + S) * S, 3)
        self.floats(p + ".ffn.gate.weight", self.random(E, H) * 1.6 / H ** 0.5)
        self.floats(p + ".ffn.gate.bias", 0.3 * self.random(E))
        for e in [f"experts.{i}" for i in range(E)] + ["shared_experts"]:
            store = store_fp8 if e[0] == "s" else store_fp4
            for name, rows, cols in (("w1", I, H), ("w3", I, H), ("w2", H, I)): self.matrix(f"{p}.ffn.{e}.{name}", rows, cols, store)

# ---- one layer, on streams [n, S, H]

def rms(x, w=None): return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 if w is None else w)

def turn(x, at, back=False):
    """the last TURNED values of x [n, heads, D], in neighbouring pairs"""
    angle = at[:, None] * C["rope_theta"] ** (-torch.arange(0, TURNED, 2) / TURNED)
    z = torch.view_as_complex(x[..., -TURNED:].unflatten(-1, (-1, 2)).contiguous())
    z = z * torch.polar(torch.ones_like(angle), -angle if back else angle)[:, None]
    return torch.cat([x[..., :-TURNED], torch.view_as_real(z).flatten(-2)], -1)

def mixes(W, site, h):
    flat = h.flatten(1)
    m = (flat @ W[site + "_fn"].T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    s, b = W[site + "_scale"], W[site + "_base"]
    enter = torch.sigmoid(m[:, :S] * s[0] + b[:S]) + HC
    if m.shape[1] == S: return enter
    mix = torch.softmax((m[:, 2 * S :] * s[2] + b[2 * S :]).reshape(-1, S, S), -1) + HC
    mix = mix / (mix.sum(1, keepdim=True) + HC)
    for _ in range(C["hc_sinkhorn_iters"] - 1):
        mix = mix / (mix.sum(2, keepdim=True) + HC)
        mix = mix / (mix.sum(1, keepdim=True) + HC)
    return enter, 2 * torch.sigmoid(m[:, S : 2 * S] * s[1] + b[S : 2 * S]), mix

def key_rows(W, p, x, at): return turn(rms(x @ W[p + ".attn.wkv"].T, W[p + ".attn.kv_norm"])[:, None], at)[:, 0]

def attend(W, p, x, at, keys, seen):
    """x [n, H] at positions at [n] over keys [m, D], of which seen [n, m]"""
    a = p + ".attn."
    q = rms(x @ W[a + "wq_a"].T, W[a + "q_norm"]) @ W[a + "wq_b"].T
    q = turn(rms(q.unflatten(-1, (N, D))), at)
    score = (torch.einsum("nhd,md->nhm", q, keys) * D ** -0.5).masked_fill(~seen[:, None], -torch.inf)
    weight = torch.softmax(torch.cat([score, W[a + "attn_sink"].expand(len(x), N)[..., None]], -1), -1)[..., :-1]
    out = turn(torch.einsum("nhm,md->nhd", weight, keys), at, back=True).flatten(1).unflatten(-1, (G, -1))
    return torch.einsum("ngc,goc->ngo", out, W[a + "wo_a"].unflatten(0, (G, O))).flatten(1) @ W[a + "wo_b"].T

def experts(W, p, x):
    limit, score = C["swiglu_limit"], F.softplus(x @ W[p + ".ffn.gate.weight"].T).sqrt()
    best = (score + W[p + ".ffn.gate.bias"]).topk(K + 1)
    gaps.append((best.values[:, K - 1] - best.values[:, K]).min().item())
    def one(e, x):
        g, u = (x @ W[f"{p}.ffn.{e}.w1"].T).clamp(max=limit), (x @ W[f"{p}.ffn.{e}.w3"].T).clamp(-limit, limit)
        return (F.silu(g) * u) @ W[f"{p}.ffn.{e}.w2"].T
    chosen = torch.zeros_like(score).scatter(1, best.indices[:, :K], score.gather(1, best.indices[:, :K]))
    chosen = chosen / chosen.sum(-1, keepdim=True) * C["routed_scaling_factor"]
    return one("shared_experts", x) + sum(chosen[:, e, None] * one(f"experts.{e}", x) for e in range(E))

def layer(W, p, h, sublayer):
    """sublayer: normed input -> what attention adds"""
    for site, norm, work in (("hc_attn", "attn_norm", sublayer), ("hc_ffn", "ffn_norm", lambda x: experts(W, p, x))):
        enter, take, mix = mixes(W, f"{p}.{site}", h)
        y = work(rms((enter[..., None] * h).sum(1), W[f"{p}.{norm}"]))
        h = take[..., None] * y[:, None] + torch.einsum("njk,njh->nkh", mix, h)
    return h

def entered(W, p, h):
    return rms((mixes(W, p + ".hc_attn", h)[0][..., None] * h).sum(1), W[p + ".attn_norm"])

# ---- the target, and the two drafters over its whole history

gaps = []
target = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, attn_implementation="eager").eval()
streams = {}
for i, module in enumerate(target.model.layers):
    module.register_forward_hook(lambda m, a, out, i=i: streams.__setitem__(i, out[0] if isinstance(out, tuple) else out))
EMBED, HEAD = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()

@torch.no_grad()
def run_target(ids):
    logits = target(torch.tensor([ids]), use_cache=False).logits[0]
    return logits, {i: h[0] for i, h in streams.items()}

def finish(W, last, h):
    y = (mixes(W, last + ".hc_head", h)[..., None] * h).sum(1)
    return y, rms(y, W[last + ".norm"]) @ HEAD.T

def features(W, hidden): return rms(torch.cat([hidden[i].mean(1) for i in TAPS], -1) @ W["mtp.0.main_proj"].T, W["mtp.0.main_norm"])

@torch.no_grad()
def draft_dspark(W, hidden, ids):
    """after ids, whose last one the target has not seen"""
    n = len(ids) - 1
    x, at = features(W, hidden)[:n], n + torch.arange(BLOCK)
    h = EMBED[torch.tensor([ids[-1]] + [NOISE] * (BLOCK - 1))][:, None].repeat(1, S, 1)
    for p in ("mtp.0", "mtp.1"):
        first = max(0, n - WINDOW)
        ring = key_rows(W, p, x[first:], torch.arange(first, n))
        def sublayer(x, p=p, ring=ring):
            keys = torch.cat([ring, key_rows(W, p, x, at)])
            return attend(W, p, x, at, keys, torch.ones(BLOCK, len(keys), dtype=torch.bool))
        h = layer(W, p, h, sublayer)
    y, logits = finish(W, "mtp.1", h)
    out, conf = [ids[-1]], []
    for j in range(BLOCK):
        e = W["mtp.1.markov_head.markov_w1.weight"][out[-1]]
        logits[j] += W["mtp.1.markov_head.markov_w2.weight"] @ e
        conf.append(W["mtp.1.confidence_head.proj.weight"][0] @ torch.cat([y[j], e]))
        out.append(logits[j].argmax().item())
    return out[1:], logits, torch.stack(conf), y

def paired_streams(W, hidden, ids):
    """row t: the target's streams at t and the token at t + 1"""
    n, p = len(ids) - 1, "mtp.0"
    return (rms(EMBED[ids[1:]], W[p + ".enorm"]) @ W[p + ".e_proj"].T)[:, None] + rms(hidden[C["num_hidden_layers"] - 1][:n], W[p + ".hnorm"]) @ W[p + ".h_proj"].T

@torch.no_grad()
def draft_mtp(W, hidden, ids):
    h, p = paired_streams(W, hidden, ids), "mtp.0"
    at = torch.arange(len(h))
    seen = (at <= at[:, None]) & (at > at[:, None] - WINDOW)
    y, logits = finish(W, p, layer(W, p, h, lambda x: attend(W, p, x, at, key_rows(W, p, x, at), seen)))
    return [logits[-1].argmax().item()], logits[-1:], None, y[-1:]

# ---- weights, rounds, files

def make_weights(kind, seed):
    W = Weights(torch.Generator().manual_seed(seed))
    stages = ["mtp.0", "mtp.1"] if kind == "dspark" else ["mtp.0"]
    for p in stages: W.layer(p)
    W.norm(stages[-1] + ".norm", H); W.hyper(stages[-1] + ".hc_head", S, 1)
    if kind == "mtp":
        W.matrix("mtp.0.e_proj", H, H); W.matrix("mtp.0.h_proj", H, H); W.norm("mtp.0.enorm", H); W.norm("mtp.0.hnorm", H)
        return W
    W.matrix("mtp.0.main_proj", H, H * len(TAPS)); W.norm("mtp.0.main_norm", H)
    W.floats("mtp.1.markov_head.markov_w1.weight", W.random(V, RANK)); W.floats("mtp.1.markov_head.markov_w2.weight", 0.2 * W.random(V, RANK))
    W.floats("mtp.1.confidence_head.proj.weight", 0.04 * W.random(1, H + RANK))
    return W

def learn(W, kind, stream):
    """most of the stream's successions become what is drafted, so that some drafts are accepted"""
    follow = {a: b for a, b in zip(stream[:-1], stream[1:]) if torch.rand(1, generator=W.g) < 0.75}
    a, b = torch.tensor(list(follow)), torch.tensor(list(follow.values()))
    if kind == "dspark":
        w1, w2 = W["mtp.1.markov_head.markov_w1.weight"], W["mtp.1.markov_head.markov_w2.weight"].clone()
        w2[b] += 14 * w1[a] / w1[a].square().sum(-1, keepdim=True)
        return W.floats("mtp.1.markov_head.markov_w2.weight", w2)
    x, y = rms(EMBED[a], W["mtp.0.enorm"]), 8 * HEAD[b] / HEAD[b].norm(dim=-1, keepdim=True) * H ** 0.5 / 4
    W["mtp.0.e_proj"] = store_fp8(W.stored, "mtp.0.e_proj", W["mtp.0.e_proj"] + (torch.linalg.pinv(x) @ (y - x @ W["mtp.0.e_proj"].T)).T)

def make(kind, seed):
    W, draft = make_weights(kind, seed), draft_dspark if kind == "dspark" else draft_mtp
    prompt = np.random.default_rng(seed).integers(3, V - 30, PROMPT).tolist()
    stream = []
    while len(stream) < COUNT: stream.append(run_target(prompt + stream)[0][-1].argmax().item())
    learn(W, kind, stream)
    ids, rounds, margins = prompt + stream[:1], [], []
    gaps.clear()
    while len(ids) - PROMPT < COUNT:
        hidden = run_target(ids)[1]
        proposed, logits, conf, y = draft(W, hidden, ids)
        want = run_target(ids + proposed)[0][len(ids) - 1 :].argmax(-1).tolist()
        accepted = next((j for j, token in enumerate(proposed) if token != want[j]), len(proposed))
        best = logits.topk(2).values
        margins.append((best[:, 0] - best[:, 1]).min().item())
        rounds.append(dict(anchor=ids[-1], position=len(ids) - 1, accepted=accepted, ids=proposed, logits=logits, conf=conf, hidden=y))
        ids += want[: accepted + 1]
    assert ids[PROMPT:][:COUNT] == stream, "the drafted stream is another"
    whole = lambda key: torch.tensor([r[key] for r in rounds], dtype=torch.int32)
    golden = {"input_ids": torch.tensor(prompt, dtype=torch.int32), "greedy": torch.tensor(stream, dtype=torch.int32)}
    golden.update({key: whole(key) for key in ("anchor", "position", "accepted", "ids")})
    golden.update({key: torch.stack([r[key] for r in rounds]) for key in ("logits", "hidden")})
    if kind == "dspark":
        golden["conf"] = torch.stack([r["conf"] for r in rounds])
        golden["main"] = features(W, run_target(prompt)[1]).detach()
    save_file(W.stored, os.path.join(OUT, kind + ".safetensors"))
    save_file(golden, os.path.join(OUT, kind + "-golden.safetensors"))
    print(kind, seed, "accepted", [r["accepted"] for r in rounds], "least margin", min(margins), "least router gap", min(gaps),
          "distinct", len(set(stream)), "std", golden["logits"].std().item(), {f: os.path.getsize(os.path.join(OUT, f)) for f in os.listdir(OUT)})

os.makedirs(OUT, exist_ok=True)
known = load_file(os.path.join(BASE, "golden.safetensors"))
print("target off by", (run_target(known["input_ids"].tolist())[0] - known["logits"][: len(known["input_ids"])]).abs().max().item())
import sys
make("dspark", int(sys.argv[1]) if len(sys.argv) > 1 else 1)
make("mtp", int(sys.argv[2]) if len(sys.argv) > 2 else 2)
