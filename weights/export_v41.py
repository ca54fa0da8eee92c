#!/usr/bin/env python3
"""Writes a trained model_v41 as a published checkpoint: DeepSeek-V4.1's tensor names and formats, config, tokenizer.

    python3 export_v41.py DIR_WITH_mini-*.safetensors OUT_DIR
    python3 export_v41.py --random OUT_DIR          the same of untrained weights, large enough that everything shows
    python3 export_v41.py --check OUT_DIR ORACLE    reads the file back into model_v41.py and compares with deepseek_v41_reference.py in the folder ORACLE

Matrices are e4m3 with one exponent (E8M0) for 32 x 32, routed experts e2m1, two in a byte, with one for 32 of a row, Engram's tables e4m3
with one for 32 of a row; what mixes streams, sinks and router biases are F32, the rest is bf16.  The head is the embedding.
"""
import json, os, shutil, struct, sys
import torch
import model as M
import model_v41 as V

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get('TIDE_BUILD', os.path.join(HERE, 'build'))
CONTEXT = 16384                     # trained up to 8,448
BOS, EOS, PAD, IMAGE = '<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜▁pad▁｜>', '<｜deepseek_image｜>'


def block(p, b):
    """name -> (kind, tensor): 8, 4 and 1 as in model_v41, 16 bf16, 32 F32"""
    a, m, E = p + 'attn.', p + 'ffn.', len(b.bias)
    out = {a + 'wq_a.weight': (8, b.wq_a), a + 'q_norm.weight': (16, b.q_norm), a + 'wq_b.weight': (8, b.wq_b), a + 'wkv.weight': (8, b.wkv), a + 'kv_norm.weight': (16, b.kv_norm),
           a + 'wo_a.weight': (8, b.wo_a.flatten(0, 1)), a + 'wo_b.weight': (8, b.wo_b), a + 'attn_sink': (32, b.sink), p + 'attn_norm.weight': (16, b.norm), p + 'ffn_norm.weight': (16, b.post_norm),
           m + 'gate.weight': (16, b.router), m + 'gate.bias': (32, b.bias), m + 'gate.bias_vl': (32, torch.zeros(E))}
    for site, s in (('attn', b.hc_attn), ('ffn', b.hc_ffn)):
        out.update({p + 'hc_%s_%s' % (site, n): (32, t) for n, t in (('fn', s.fn), ('base', s.base), ('scale', s.scale))})
    for e in range(E + 1):
        x, kind = (m + 'experts.%d.' % e, 4) if e < E else (m + 'shared_experts.', 8)
        out.update({x + 'w1.weight': (kind, b.gate_up[e, 0]), x + 'w3.weight': (kind, b.gate_up[e, 1]), x + 'w2.weight': (kind, b.down[e].T)})
    if b.source:
        out.update({a + 'compressor.wkv.weight': (16, b.c_wkv), a + 'compressor.norm.weight': (16, b.c_norm), a + 'indexer.wk.weight': (16, b.wk), a + 'indexer.k_norm.weight': (16, b.k_norm)})
        if b.ratio > 1:
            out[a + 'compressor.wgate.weight'] = (16, b.c_gate)
    if b.selects:
        out.update({a + 'indexer.wq_b.weight': (8, b.iq_b), a + 'indexer.weights_proj.weight': (16, b.w_proj)})
    if b.engram:
        e = p + 'engram.'
        out.update({e + 'embed.weight': (1, b.table), e + 'wkv.weight': (8, b.e_wkv.flatten(0, 1)), e + 'q_weight': (16, b.e_q), e + 'k_weight': (16, b.e_k)})
    return out


def published(net):
    out, d, last = {'embed.weight': (16, net.embed)}, net.draft, 'mtp.%d.' % (net.c.stages - 1)
    for b in net.blocks:
        out.update(block('layers.%d.' % b.i, b))
    out['norm.weight'] = (16, net.norm)
    for b in d.stages:
        out.update(block('mtp.%d.' % b.i, b))
    out.update({'mtp.0.main_proj.weight': (8, d.main_proj), 'mtp.0.main_norm.weight': (16, d.main_norm), last + 'norm.weight': (16, d.norm), last + 'markov_head.embed.weight': (16, d.markov_embed),
                last + 'markov_head.head.weight': (16, d.markov_head), last + 'confidence_head.proj.weight': (16, d.conf)})
    return out


def encode(kind, t):
    """-> (type, bytes), and the exponents where there are any"""
    t = t.detach().float().contiguous()
    if kind in (16, 32):
        return [('BF16', t.bfloat16().view(torch.int16).numpy(), t.shape) if kind == 16 else ('F32', t.numpy(), t.shape)]
    v, e = V.quantise(kind, V.groups(kind, t))
    v, (R, C) = V.ungroup(kind, v, t.shape), t.shape
    scale = ('F8_E8M0', (e + 127).to(torch.uint8).numpy(), (R // 32, C // 32) if kind == 8 else (R, C // 32))
    if kind != 4:
        return [('F8_E4M3', v.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), t.shape), scale]
    code = torch.searchsorted(torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6]), v.abs()) + 8 * (v < 0)
    return [('I8', (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8).numpy(), (R, C // 2)), scale]


def write_file(path, tensors):
    head, blobs, at = {'__metadata__': {'format': 'pt'}}, [], 0
    for name, (kind, data, shape) in tensors.items():
        blobs.append(data.tobytes())
        head[name] = {'dtype': kind, 'shape': list(shape), 'data_offsets': [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    h = json.dumps(head, separators=(',', ':')).encode()
    h += b' ' * (-(len(h) + 8) % 64)
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(h)) + h + b''.join(blobs))


def config(c, ids):
    text = {'model_type': 'deepseek_v41_text', 'vocab_size': c.vocab, 'hidden_size': c.hidden, 'moe_intermediate_size': c.inner, 'num_hidden_layers': c.layers, 'num_attention_heads': c.heads, 'num_key_value_heads': 1,
            'head_dim': c.head_dim, 'qk_rope_head_dim': c.rope, 'q_lora_rank': c.q_lora, 'o_lora_rank': c.o_lora, 'o_groups': c.o_groups, 'hidden_act': 'silu', 'swiglu_limit': c.limit, 'rms_norm_eps': V.EPS,
            'attention_bias': False, 'tie_word_embeddings': True, 'max_position_embeddings': CONTEXT, 'rope_theta': c.theta,
            'rope_scaling': {'rope_type': 'yarn', 'factor': c.yarn[0], 'beta_fast': c.yarn[1], 'beta_slow': c.yarn[2], 'original_max_position_embeddings': c.yarn[3]},
            'n_routed_experts': c.experts, 'n_shared_experts': 1, 'num_experts_per_tok': c.top, 'scoring_func': 'sqrtsoftplus', 'topk_method': 'noaux_tc', 'norm_topk_prob': True, 'routed_scaling_factor': c.route_scale,
            'sliding_window': c.window, 'compress_ratios': list(c.ratios) + [0] * c.stages, 'compress_rope_theta': c.compress_theta, 'kv_source_layer_ids': list(c.sources), 'index_source_layer_ids': list(c.selectors),
            'index_n_heads': c.index_heads, 'index_head_dim': c.index_dim, 'index_topk': c.topk, 'candidate_source_layer_id': c.candidate_layer, 'candidate_topk_blocks': c.candidate_blocks,
            'candidate_block_size': c.candidate_size, 'hc_mult': c.streams, 'hc_sinkhorn_iters': V.SINKHORN, 'hc_eps': V.HC_EPS, 'engram_layer_ids': list(c.engram_layers),
            'engram_num_embeddings': [sum(p) for p in c.primes().values()], 'engram_max_ngram_size': c.engram_order, 'engram_vocab_size': c.engram_vocab, 'engram_n_heads': c.engram_heads, 'engram_head_dim': c.engram_dim,
            'engram_pad_token_id': c.engram_pad, 'engram_compressed_vocab_size': c.engram_known, 'num_nextn_predict_layers': c.stages, 'dspark_block_size': c.block, 'dspark_noise_token_id': c.noise,
            'dspark_target_layer_ids': list(c.taps), 'dspark_markov_rank': c.rank, 'dspark_n_routed_experts': c.draft_experts, 'dspark_num_experts_per_tok': c.draft_top}
    return {'architectures': ['DeepseekV41ForCausalLM'], 'model_type': 'deepseek_v41', 'dtype': 'bfloat16', 'bos_token_id': ids[BOS], 'eos_token_id': ids[EOS], 'pad_token_id': ids[PAD], 'image_token_id': ids[IMAGE],
            'quantization_config': {'quant_method': 'fp8', 'activation_scheme': 'dynamic', 'weight_block_size': [32, 32], 'scale_fmt': 'ue8m0', 'expert_dtype': 'fp4'}, 'text_config': text,
            'vision_config': {'model_type': 'deepseek_v41_vision', 'num_hidden_layers': 0, 'hidden_size': 32, 'num_attention_heads': 2, 'intermediate_size': 64, 'patch_size': 14, 'rope_theta': 10000, 'downsample_ratio': 3,
                              'max_image_tokens': 1024, 'min_pixels': 295936, 'max_wh_ratio': None}}


def write(net, dest):
    os.makedirs(dest, exist_ok=True)
    tensors = {}
    for name, (kind, t) in published(net).items():
        for part, suffix in zip(encode(kind, t), ('weight', 'scale')):
            tensors[name[:-6] + suffix if name.endswith('.weight') else name] = part
    tensors['engram.token_map'] = ('I32', net.token_map.cpu().int().numpy(), net.token_map.shape)
    write_file(dest + '/model.safetensors', tensors)
    shutil.copy(BUILD + '/tokenizer-v41.json', dest + '/tokenizer.json')
    special = json.load(open(dest + '/tokenizer.json'))['added_tokens']
    ids = {s['content']: s['id'] for s in special}
    dump = lambda name, d: open(dest + '/' + name, 'w').write(json.dumps(d, indent=1, ensure_ascii=False) + '\n')
    dump('config.json', config(net.c, ids))
    dump('generation_config.json', {'do_sample': True, 'temperature': 0.7, 'top_p': 0.95, 'bos_token_id': ids[BOS], 'eos_token_id': ids[EOS]})
    dump('tokenizer_config.json', {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': CONTEXT, 'bos_token': BOS, 'eos_token': EOS, 'pad_token': PAD, 'add_bos_token': True})
    held_out(ids, dest)
    print({f: os.path.getsize(dest + '/' + f) for f in sorted(os.listdir(dest))})


def held_out(special, dest):
    """heldout.jsonl in this vocabulary and chat format."""
    import corpus
    parts, one = corpus.apart(), lambda s: [special[s]]
    with open(HERE + '/heldout.jsonl') as f, open(dest + '/heldout.jsonl', 'w') as g:
        tok = {s['content']: s['id'] for s in json.load(open(HERE + '/mini/tokenizer.json'))['added_tokens']}
        parts = dict(enumerate(parts)) | {tok['[gMASK]']: one(BOS), tok['<sop>']: [], tok['<|user|>']: one('<｜User｜>'), tok['<|assistant|>']: one('<｜Assistant｜>'), tok['</think>']: one('</think>')}
        for line in map(json.loads, f):
            g.write(json.dumps(dict(line, ids=[j for i in line['ids'] for j in parts[i]]), separators=(',', ':')) + '\n')


def fresh(compiled=False):
    """An untrained model with the tokenizer's map."""
    from tokenizers import Tokenizer
    mapping, known = V.token_map(Tokenizer.from_file(BUILD + '/tokenizer-v41.json'), V.Config.vocab)
    return V.Mini(V.Config(engram_known=known), mapping, compiled)


def shaken(net):
    torch.manual_seed(1)
    with torch.no_grad():
        for n, p in net.named_parameters():
            if n.endswith(('conf', 'markov_head', 'sink', 'norm')):
                p.add_(torch.randn_like(p) * 0.2)
            if n.endswith('.fn'):
                p.mul_(10)
        net.embed.mul_(10)
    return net


def export(source, dest):
    import train
    net = fresh()
    train.load_weights(net, source)
    write(net, dest)


def check(net, dest, oracle, n=120):
    """Logits of every position and blocks of drafts against the reference that reads the file by itself.  Over more than topk rows near ties
    fall this way or that, and what follows differs."""
    sys.path.insert(0, oracle)
    import deepseek_v41_reference as R
    M.LOW = False
    with torch.no_grad():
        ids = torch.randint(0, net.c.vocab - 32, (1, n), generator=torch.Generator().manual_seed(3))
        taps = []
        y, _, _ = net(ids, sparse=True, hidden_taps=taps)
        ours = net.logits(y)
        model, state = R.Model(dest.rstrip('/')), R.State()
        model.W['head.weight'] = model.W['embed.weight']
        theirs = model.forward(ids[0].tolist(), state)
        d = (ours - theirs['logits']).abs()
        print('%d tokens: logits differ by at most %.2e, spread %.2f; taps %.2e' % (n, d.max(), theirs['logits'].std(), (torch.cat(taps, -1) - theirs['taps']).abs().max()))
        draft = R.Drafter(model)
        for at in (n // 2, n - 5):
            draft.__init__(model)
            draft.absorb(theirs['taps'][:at])
            got, logits, conf, hidden = draft.draft(int(ids[0, at]))
            y, _ = net.draft(net, torch.cat(taps, -1), ids, torch.tensor([[at]]))
            prev = torch.tensor([int(ids[0, at])] + got[:-1])
            e = net.draft.markov_embed[prev]
            mine = V.rms(y, net.draft.norm) @ net.embed.T + e @ net.draft.markov_head.T
            z = torch.cat((y, e), -1) @ net.draft.conf[0]
            print('drafts after %d: hidden %.2e, logits %.2e, confidence %.2e' % (at, (y - hidden).abs().max(), (mine - logits).abs().max(), (z - conf).abs().max()))


def read(net, dest):
    """The exported file back into model_v41's parameters."""
    raw = open(dest + '/model.safetensors', 'rb').read()
    size = struct.unpack('<Q', raw[:8])[0]
    head, get = json.loads(raw[8:8 + size]), {}
    kinds = {'F32': torch.float32, 'BF16': torch.bfloat16, 'F8_E4M3': torch.float8_e4m3fn, 'F8_E8M0': torch.uint8, 'I8': torch.uint8, 'I32': torch.int32}
    for name, m in head.items():
        if name != '__metadata__':
            a, b = m['data_offsets']
            get[name] = torch.frombuffer(bytearray(raw[8 + size + a:8 + size + b]), dtype=kinds[m['dtype']]).view(m['shape'])
    with torch.no_grad():
        for name, (kind, t) in published(net).items():
            v = get[name]
            if kind == 4:
                v = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6])[torch.stack((v & 15, v >> 4), -1).long()].flatten(-2)
            if kind in (1, 4, 8):
                s = torch.exp2(get[name[:-6] + 'scale'].float() - 127).repeat_interleave(32, -1)
                v = v.float() * (s.repeat_interleave(32, 0) if kind == 8 else s)
            t.copy_(v.float())
    return net


if __name__ == '__main__':
    if sys.argv[1] == '--check':
        check(read(fresh(), sys.argv[2]), sys.argv[2], sys.argv[3])
    elif sys.argv[1] == '--random':
        write(shaken(fresh()), sys.argv[2])
    else:
        export(sys.argv[1], sys.argv[2])
