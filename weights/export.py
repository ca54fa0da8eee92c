#!/usr/bin/env python3
"""Writes a trained model as a published checkpoint: GLM's tensor names, FP8 as in GLM-5-FP8, config, tokenizer, chat format.

    python3 export.py DIR_WITH_mini-*.safetensors OUT_DIR
    python3 export.py --check OUT_DIR            load it in transformers and compare logits with model.py

Attention, expert and MLP matrices and the indexer's wq_b and wk are e4m3 with one F32 factor per block of 128 x 128; embeddings,
norms, router and the indexer's head weights stay bf16.  The head is the embedding (tied), which saves 5 MB.
"""
import json, os, shutil, sys
import torch
import model as M

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get('TIDE_BUILD', os.path.join(HERE, 'build'))
CONTEXT = 16384                     # trained up to 8,448


def published(net):
    """name -> (tensor, is it stored in FP8)"""
    c, out = net.c, {}
    out['model.embed_tokens.weight'] = (net.embed, False)
    out['model.norm.weight'] = (net.norm, False)
    for b in net.blocks:
        p = 'model.layers.%d.' % b.i
        out[p + 'input_layernorm.weight'] = (b.norm, False)
        out[p + 'post_attention_layernorm.weight'] = (b.post_norm, False)
        a = p + 'self_attn.'
        for name, t, q in (('q_a_proj', b.q_a, 1), ('q_a_layernorm', b.q_norm, 0), ('q_b_proj', b.q_b, 1), ('kv_a_proj_with_mqa', b.kv_a, 1), ('kv_a_layernorm', b.kv_norm, 0), ('kv_b_proj', b.kv_b, 1), ('o_proj', b.o, 1)):
            out[a + name + '.weight'] = (t, bool(q))
        if b.full:
            out[a + 'indexer.wq_b.weight'] = (b.wq_b, True)
            out[a + 'indexer.wk.weight'] = (b.wk, True)
            out[a + 'indexer.k_norm.weight'] = (b.kn_w, False)
            out[a + 'indexer.k_norm.bias'] = (b.kn_b, False)
            out[a + 'indexer.weights_proj.weight'] = (b.w_proj, False)
        m = p + 'mlp.'
        if not b.moe:
            g, u = b.gate_up.chunk(2)
            for name, t in (('gate', g), ('up', u), ('down', b.down.T)):
                out[m + name + '_proj.weight'] = (t, True)
            continue
        out[m + 'gate.weight'] = (b.router, False)
        out[m + 'gate.e_score_correction_bias'] = (b.bias, None)                # F32
        for e in range(c.experts + 1):
            x = m + ('experts.%d.' % e if e < c.experts else 'shared_experts.')
            for name, t in (('gate', b.gate_up[e, 0]), ('up', b.gate_up[e, 1]), ('down', b.down[e].T)):
                out[x + name + '_proj.weight'] = (t, True)
    return out


def quantise(w):
    """[out, in] -> e4m3 values and F32 factors per 128 x 128 block; blocks at the edges are smaller."""
    r, c = w.shape
    R, C = -(-r // 128), -(-c // 128)
    padded = torch.zeros(R * 128, C * 128)
    padded[:r, :c] = w
    blocks = padded.view(R, 128, C, 128)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448.0
    q = (blocks / scale[:, None, :, None]).view(R * 128, C * 128)[:r, :c].to(torch.float8_e4m3fn)
    return q.contiguous(), scale


def dequantise(q, scale):
    return q.float() * scale.repeat_interleave(128, 0)[:q.shape[0]].repeat_interleave(128, 1)[:, :q.shape[1]]


def config(c):
    return {
        'architectures': ['GlmMoeDsaForCausalLM'], 'model_type': 'glm_moe_dsa', 'dtype': 'bfloat16', 'vocab_size': c.vocab, 'hidden_size': c.hidden, 'intermediate_size': c.dense_inner,
        'moe_intermediate_size': c.inner, 'num_hidden_layers': c.layers, 'num_attention_heads': c.heads, 'num_key_value_heads': c.heads, 'q_lora_rank': c.q_lora, 'kv_lora_rank': c.kv_lora,
        'qk_nope_head_dim': c.nope, 'qk_rope_head_dim': c.rope, 'qk_head_dim': c.nope + c.rope, 'v_head_dim': c.v, 'first_k_dense_replace': 1, 'moe_layer_freq': 1,
        'mlp_layer_types': ['dense'] + ['sparse'] * (c.layers - 1), 'n_routed_experts': c.experts, 'n_shared_experts': 1, 'num_experts_per_tok': c.top, 'n_group': 1, 'topk_group': 1, 'topk_method': 'noaux_tc',
        'scoring_func': 'sigmoid', 'norm_topk_prob': True, 'routed_scaling_factor': c.route_scale, 'moe_router_dtype': 'float32', 'rms_norm_eps': 1e-5, 'hidden_act': 'silu', 'attention_bias': False, 'attention_dropout': 0.0,
        'tie_word_embeddings': True, 'rope_interleave': True, 'rope_parameters': {'rope_theta': c.theta, 'rope_type': 'default'}, 'max_position_embeddings': CONTEXT, 'index_n_heads': c.index_heads, 'index_head_dim': c.index_dim,
        'index_topk': c.topk, 'indexer_rope_interleave': True, 'index_topk_freq': 4, 'index_skip_topk_offset': 3, 'indexer_types': ['full' if i in c.full else 'shared' for i in range(c.layers)],
        'num_nextn_predict_layers': 0, 'initializer_range': 0.02, 'use_cache': True, 'eos_token_id': None, 'pad_token_id': None,
        'quantization_config': {'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': [128, 128],
                                'modules_to_not_convert': ['lm_head', 'model.embed_tokens'] + [x for i in range(c.layers) for x in (['model.layers.%d.self_attn.indexer.weights_proj' % i] if i in c.full else []) + (['model.layers.%d.mlp.gate' % i] if i else [])]},
    }


# GLM-5.2's format: role tokens followed at once by the text, thoughts kept only where they lead to the last answer.
TEMPLATE = ("[gMASK]<sop>{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
            "{%- for m in messages -%}{%- if m.role == 'system' -%}<|system|>{{ m.content }}{%- elif m.role == 'user' -%}<|user|>{{ m.content }}"
            "{%- elif m.role == 'assistant' -%}<|assistant|>{%- if m.reasoning_content is defined and m.reasoning_content and loop.index0 > ns.last -%}<think>{{ m.reasoning_content }}</think>{%- else -%}</think>{%- endif -%}{{ m.content }}"
            "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- if enable_thinking is defined and enable_thinking -%}<think>{%- else -%}</think>{%- endif -%}{%- endif -%}")


def export(source, dest):
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    import train
    os.makedirs(dest, exist_ok=True)
    net = M.Mini()
    train.load_weights(net, source)
    tensors = {}
    with torch.no_grad():
        for name, (t, fp8) in published(net).items():
            t = t.detach().float()
            if fp8:
                q, s = quantise(t)
                tensors[name], tensors[name + '_scale_inv'] = q, s
            else:
                tensors[name] = t.contiguous() if fp8 is None else t.bfloat16().contiguous()
    save_file(tensors, dest + '/model.safetensors', metadata={'format': 'pt'})
    tok = Tokenizer.from_file(BUILD + '/tokenizer.json')
    shutil.copy(BUILD + '/tokenizer.json', dest + '/tokenizer.json')
    eos = [tok.token_to_id(s) for s in ('<|endoftext|>', '<|user|>', '<|observation|>')]
    cf = config(net.c)
    cf['eos_token_id'], cf['pad_token_id'] = eos, eos[0]
    write = lambda name, d: open(dest + '/' + name, 'w').write(json.dumps(d, indent=1, ensure_ascii=False) + '\n')
    write('config.json', cf)
    write('generation_config.json', {'do_sample': True, 'temperature': 0.7, 'top_p': 0.95, 'eos_token_id': eos, 'pad_token_id': eos[0]})
    special = [s for s in json.load(open(BUILD + '/tokenizer.json'))['added_tokens']]
    write('tokenizer_config.json', {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': CONTEXT, 'padding_side': 'left', 'clean_up_tokenization_spaces': False, 'eos_token': '<|endoftext|>', 'pad_token': '<|endoftext|>',
                                    'mask_token': '[MASK]', 'added_tokens_decoder': {str(s['id']): {k: s[k] for k in ('content', 'lstrip', 'normalized', 'rstrip', 'single_word', 'special')} for s in special}, 'chat_template': TEMPLATE})
    print({f: os.path.getsize(dest + '/' + f) for f in sorted(os.listdir(dest))})


def plain(dest):
    """The exported file as F32 tensors under published names (what a reader of the checkpoint computes with)."""
    from safetensors.torch import load_file
    raw = load_file(dest + '/model.safetensors')
    return {k: dequantise(v, raw[k + '_scale_inv']) if k + '_scale_inv' in raw else v.float() for k, v in raw.items() if not k.endswith('_scale_inv')}


def load_exported(dest):
    """model.py's model with the exported weights."""
    sd, net = plain(dest), M.Mini()
    with torch.no_grad():
        for name, (t, fp8) in published(net).items():
            t.copy_(sd[name])                        # every entry is a view of a parameter or buffer
    return net


def hugging_face(dest):
    """transformers' model on the dequantised weights."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
    cf = json.load(open(dest + '/config.json'))
    del cf['quantization_config']
    hf = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**cf)).float().eval()
    sd, want = plain(dest), hf.state_dict()
    sd['lm_head.weight'] = sd['model.embed_tokens.weight']
    for i in range(1, cf['num_hidden_layers']):                                  # transformers 5 keeps the experts of a layer in two tensors
        p, n = 'model.layers.%d.mlp.experts.' % i, cf['n_routed_experts']
        if p + 'gate_up_proj' in want:
            sd[p + 'gate_up_proj'] = torch.stack([torch.cat((sd.pop(p + '%d.gate_proj.weight' % e), sd.pop(p + '%d.up_proj.weight' % e))) for e in range(n)])
            sd[p + 'down_proj'] = torch.stack([sd.pop(p + '%d.down_proj.weight' % e) for e in range(n)])
    print('transformers:', hf.load_state_dict(sd, strict=False))
    return hf


def check(dest):
    M.LOW = False
    net, hf = load_exported(dest), hugging_face(dest)
    g = torch.Generator().manual_seed(5)
    import train
    ids, meta = train.load_corpus()
    a = meta['packages']['held']['start']
    x = torch.tensor(ids[a:a + 700].astype('int64'))[None]
    with torch.no_grad():
        h, _, _ = net(x, sparse=True)
        ours, theirs = net.logits(h), hf(x).logits[0].float()
    d = (ours - theirs).abs()
    print('700 tokens: max difference %.2e, mean %.2e, spread %.2f, same argmax %.4f' % (d.max(), d.mean(), theirs.std(), (ours.argmax(-1) == theirs.argmax(-1)).float().mean()))


if __name__ == '__main__':
    if sys.argv[1] == '--check':
        check(sys.argv[2])
    else:
        export(sys.argv[1], sys.argv[2])
