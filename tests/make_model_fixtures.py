"""Makes tests/fixtures/deepseek_v4-a, -c, deepseek_v41-a and -c: SHARED/oracle's recipes at smaller sizes.

    python tests/make_model_fixtures.py [SHARED [OUTDIR]]       needs torch (2.11), transformers (5.17), numpy and safetensors

The full ones lie in SHARED/fixtures and are tested too where they are there. Of the hidden states the last alone is kept.
V4.1's gain qat_logits, what the reference computes when it rounds as the kernels of the release do (quant = "full").
"""
import pathlib, sys, types
from safetensors.torch import load_file, save_file

here = pathlib.Path(__file__).parent
shared = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else here.parent.parent / "shared")
sys.path.insert(0, str(shared / "oracle"))
sys.dont_write_bytecode = True                                          # SHARED stays as it is
import make_fixture, make_v41_fixture
from deepseek_v41_reference import Model, State

make_fixture.MIN_GAP = 2e-4
v4, v41 = make_fixture.variants()["deepseek_v4"], make_v41_fixture.VARIANTS
v4["a"].update(vocab_size=192, hidden_size=32, n_routed_experts=4, q_lora_rank=32)
# A rank of 136: matrices that need a second block of 128 rows or columns, and not a whole one.
v4["c"].update(vocab_size=192, hidden_size=32, moe_intermediate_size=96, q_lora_rank=136, index_n_heads=8)
make_fixture.variants = lambda: {"deepseek_v4": v4}
v41["a"][0]["image_token_id"] = 159
v41["a"][0]["text_config"].update(vocab_size=160, hidden_size=32, hc_mult=2, n_routed_experts=4, index_n_heads=10, dspark_n_routed_experts=3,
                                  dspark_noise_token_id=150, engram_compressed_vocab_size=120)
v41["c"][0]["text_config"].update(hidden_size=32, moe_intermediate_size=64, q_lora_rank=64, n_routed_experts=4, index_n_heads=8)


def keep_last_hidden(path, layers, **more):
    unused = ["hidden.%d" % layer for layer in range(layers)] + ["logits_cache"]
    unused += ["quant.in", "quant.fp8", "quant.fp4_index", "quant.fp4_rows"]             # tests/fixtures/row-formats has them
    save_file({name: value.contiguous() for name, value in load_file(path).items() if name not in unused} | more, path)


def make_v4(root, variant, tokens, seed):
    name = "deepseek_v4-" + variant
    make_fixture.make(types.SimpleNamespace(root=root, tokens=tokens, decode=8, seed=seed), name)
    keep_last_hidden("%s/%s/golden.safetensors" % (root, name), 6)


def make_v41(root, variant, seed):
    """The seed of c is the one which make_v41_fixture.py's --search thinks best of the first 137; the first will do for a."""
    folder = "%s/deepseek_v41-%s" % (root, variant)
    print(variant, make_v41_fixture.make(root, variant, seed))
    ids = load_file(folder + "/golden.safetensors")["input_ids"].tolist()
    rounded = Model(folder, "full").forward(ids, State())["logits"].float().contiguous()
    keep_last_hidden(folder + "/golden.safetensors", v41[variant][0]["text_config"]["num_hidden_layers"], qat_logits=rounded)


if __name__ == "__main__":
    root = sys.argv[2] if len(sys.argv) > 2 else str(here / "fixtures")
    make_v4(root, "a", 96, 1)
    make_v4(root, "c", 150, 1)
    make_v41(root, "a", 0)
    make_v41(root, "c", 29)
