#!/usr/bin/env python3
"""The command line as a hostile or clumsy user meets it: exit codes, streams, files, pipes, terminals, signals, memory.

Two models are made here. "chain" is a bigram automaton in Qwen3's clothes: its layers add nothing and its lm_head names one
successor for each token, so that what it says is known beforehand. "random" is the glm_moe_dsa fixture with the same byte-level
tokenizer: it babbles, but through the whole engine. TIDE names the program; ./tide if unset.
"""
import array, fcntl, json, os, re, resource, select, shutil, signal, struct, subprocess, sys, tempfile, termios, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TIDE = os.path.abspath(os.environ.get("TIDE", os.path.join(ROOT, "tide")))
SANITIZED = "asan" in os.path.basename(TIDE)
PATIENCE = 180 if SANITIZED else 60          # seconds until something that should have happened counts as hanging
MINI = os.path.join(ROOT, "weights", "mini")
FIXTURE = os.path.join(ROOT, "tests", "fixtures", "glm_moe_dsa-a")

passed = failed = 0


def check(condition, what, *details):
    global passed, failed
    if condition:
        passed += 1
        return
    failed += 1
    print("FAILED %s: %s" % (current, what), *(repr(d)[:300] for d in details), flush=True)


def equal(found, wanted, what):
    check(found == wanted, what, "found", found, "wanted", wanted)


# ---- two small models

SPECIAL = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
           "<think>", "</think>", "<|begin_of_image|>"]
VOCAB = 320


def byte_letters():
    """GPT-2's printable stand-in for each byte."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(others)}


def make_tokenizer(directory):
    letters = byte_letters()
    vocab = {letters[b]: b for b in range(256)}
    merges = [a + " " + b for a in "ABCDEFGH" for b in "ABCDEFGH"][:VOCAB - 256 - len(SPECIAL)]
    for merge in merges:
        vocab[merge.replace(" ", "")] = len(vocab)
    added = [{"id": len(vocab) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": "think" not in text} for i, text in enumerate(SPECIAL)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
                 "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                           "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}}
    write(os.path.join(directory, "tokenizer.json"), json.dumps(tokenizer))
    write(os.path.join(directory, "tokenizer_config.json"), json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}))


TOKEN = {text: VOCAB - len(SPECIAL) + i for i, text in enumerate(SPECIAL)}
PREFIX = [TOKEN["[gMASK]"], TOKEN["<sop>"]]


def write(path, data):
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
    return path


def read(path):
    with open(path, "rb") as file:
        return file.read()


def successors():
    """1234567890 and xy for ever; abcd, an emoji, efg and the end of a turn; out of <think>, rs and back."""
    chain = {}
    def follow(*tokens):
        for a, b in zip(tokens, tokens[1:]):
            chain[a] = b
    follow(*b"12345678901")
    follow(*b"xyx")
    follow(257, 257)                                # AB
    follow(TOKEN["<think>"], *b"rs", TOKEN["</think>"], *b"abcd", *"\U0001f600".encode(), *b"efg", TOKEN["<|user|>"])
    return chain


def make_chain_model(directory):
    os.mkdir(directory)
    make_tokenizer(directory)
    head = array.array("f", bytes(4 * VOCAB * VOCAB))
    for token in range(VOCAB):
        head[successors().get(token, ord("x")) * VOCAB + token] = 1
    identity = array.array("f", bytes(4 * VOCAB * VOCAB))
    for token in range(VOCAB):
        identity[token * VOCAB + token] = 1
    ones = array.array("f", [1] * VOCAB)
    dim, inner = 16, 32
    zeros = lambda n: bytes(4 * n)
    layer = "model.layers.0."
    tensors = [("model.embed_tokens.weight", [VOCAB, VOCAB], identity.tobytes()), ("lm_head.weight", [VOCAB, VOCAB], head.tobytes()),
               ("model.norm.weight", [VOCAB], ones.tobytes()), (layer + "input_layernorm.weight", [VOCAB], ones.tobytes()),
               (layer + "post_attention_layernorm.weight", [VOCAB], ones.tobytes()),
               (layer + "self_attn.q_norm.weight", [dim], ones[:dim].tobytes()), (layer + "self_attn.k_norm.weight", [dim], ones[:dim].tobytes()),
               (layer + "self_attn.q_proj.weight", [dim, VOCAB], zeros(dim * VOCAB)), (layer + "self_attn.k_proj.weight", [dim, VOCAB], zeros(dim * VOCAB)),
               (layer + "self_attn.v_proj.weight", [dim, VOCAB], zeros(dim * VOCAB)), (layer + "self_attn.o_proj.weight", [VOCAB, dim], zeros(VOCAB * dim)),
               (layer + "mlp.gate_proj.weight", [inner, VOCAB], zeros(inner * VOCAB)), (layer + "mlp.up_proj.weight", [inner, VOCAB], zeros(inner * VOCAB)),
               (layer + "mlp.down_proj.weight", [VOCAB, inner], zeros(VOCAB * inner))]
    header, offset = {}, 0
    for name, shape, data in tensors:
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    write(os.path.join(directory, "model.safetensors"), struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors))
    write(os.path.join(directory, "config.json"), json.dumps(
        {"model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": VOCAB, "intermediate_size": inner, "num_hidden_layers": 1,
         "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": dim, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
         "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False, "hidden_act": "silu"}))
    return directory


def make_random_model(directory):
    os.mkdir(directory)
    make_tokenizer(directory)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(os.path.join(FIXTURE, name), directory)
        os.chmod(os.path.join(directory, name), 0o644)
    write(os.path.join(directory, "generation_config.json"), json.dumps({"do_sample": True, "temperature": 1.0}))
    return directory


# ---- running tide

class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


def clean_error(err):
    return not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]", err) and b"Sanitizer" not in err and b"runtime error" not in err


def environment(extra=None):
    env = {"PATH": "/usr/bin:/bin", "HOME": HOME, "TERM": "xterm", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=1"}
    return env | (extra or {})


HAS_CUDA = b"auto|cpu|cuda" in subprocess.run([TIDE, "--help"], capture_output=True).stdout


def run(*args, stdin=b"", env=None, quiet=True, limits=None, **streams):
    """Runs tide to its end; stderr is checked for what it may never hold."""
    runs_a_model = bool(args) and args[0] in ("chat", "generate", "batch", "eval")
    on_cpu = ["--device", "cpu"] if runs_a_model and "--device" not in args else []
    command = [TIDE, *args[:1], *on_cpu, *args[1:]] + (["--quiet"] if quiet and runs_a_model else [])
    process = subprocess.Popen(command, stdin=streams.get("stdin_file", subprocess.PIPE), stdout=streams.get("stdout", subprocess.PIPE),
                               stderr=subprocess.PIPE, env=environment(env), preexec_fn=limits)
    try:
        out, err = process.communicate(stdin if "stdin_file" not in streams else None, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        check(False, "hangs", args)
    check(process.returncode >= 0 and clean_error(err), "ends by itself with a clean stderr", args, process.returncode, err[-1500:])
    return Result(process.returncode, out or b"", err)


def refused(code, words, *args, **kwargs):
    """tide must refuse with one line that holds every word, and print nothing else."""
    result = run(*args, **kwargs)
    lines = result.err.split(b"\n")
    check(result.code == code and len(lines) == 2 and not lines[1] and lines[0].startswith(b"tide: "), "one line, exit %d" % code, args, result.code, result.err)
    for word in words.split("|"):
        check(word.encode() in result.err, "the message says " + word, args, result.err)
    equal(result.out, b"", "nothing on stdout")
    return result


def generate(*args, model=None, **kwargs):
    return run("generate", "-m", model or CHAIN, *args, **kwargs)


# ---- the contract

def test_usage():
    equal(run("--help").code, 0, "--help")
    check(run("--help").out.startswith(b"usage: tide chat"), "--help prints the usage on stdout")
    for command in ("chat", "generate", "batch", "eval", "tokenize", "inspect", "bench"):
        result = run(command, "--help", quiet=False)
        check(result.code == 0 and result.out.startswith(b"usage:") and not result.err, command + " --help", result.err)
        check(command.encode() in result.out, "the usage names " + command)
    result = run()
    check(result.code == 2 and not result.out and b"usage:" in result.err, "no command", result.err)
    refused(2, "unknown command|frobnicate", "frobnicate")
    refused(2, "unknown command", "")
    refused(2, "unknown option|--frobnicate", "generate", "-p", "x", "--frobnicate")
    refused(2, "-p wants a value", "tokenize", "-p")
    refused(2, "unknown option", "tokenize", "-p", "x", "--\x1b[31mred\nline\u009b31m")


def test_values():
    wrong = {"-n": ["-1", "x", "", "1.5", "99999999999", "nan", "0x"], "-c": ["0", "-5", "99999999999", "12q"], "--temp": ["hot", "nan", "inf", "1e300", ""],
             "--top-p": ["-0.1", "1.1", "p"], "--min-p": ["2", "-1"], "--top-k": ["-1", "1.5"], "--repeat-penalty": ["0", "-1", "x"],
             "--seed": ["-1", "x", "1.5", "99999999999999999999999", ""], "--threads": ["0", "-1", "x"], "--slots": ["0", "x", "100000"],
             "--kv-budget": ["0", "-1", "lots", "1Q", "1GG"], "--stop": [""], "--think": ["maybe", "", "o"], "--kv-dtype": ["int4", "f", "F32"],
             "--device": ["tpu", "c"], "--kv": ["none", "", "adapt", "Resident"], "--host-budget": ["0", "-1", "lots", "1Q"], "--hot": ["0", "-1", "x", "65536", "1.5"],
             "--reclaim": ["all", ""], "--lookup": ["hash", ""], "--exact": ["perhaps"], "--special": ["yes"]}
    commands = {"--slots": ["batch", "-m", CHAIN, "x.txt"], "--special": ["tokenize", "-m", CHAIN, "-p", "x"]}
    for option, values in wrong.items():
        command = commands.get(option, ["generate", "-m", CHAIN, "-p", "x"])
        for value in values:
            result = refused(2, option, *command, option, value)
            check(b"cannot use %s " % option.encode() not in result.err, "the value is what is refused", result.err)
        refused(2, option + " wants a value", *command, option, quiet=False)


def test_later_issues():
    """What the contract promises for later is refused by a sentence, never as an unknown option."""
    for option, value in [] if HAS_CUDA else [("--device", "cuda")]:
        refused(2, option + "|this build does not have", "generate", "-m", CHAIN, "-p", "x", option, value)
    for option, value in [("--device", "cpu"), ("--device", "auto"), ("--kv", "resident"), ("--draft", "none"), ("--exact", "on"), ("--exact", "off")]:
        equal(generate("-p", "1", "-n", "2", option, value).out, b"23\n", option + " " + value)


def test_device():
    """Where the build has CUDA and the machine no GPU: one sentence, and the CPU; or an error, if CUDA was asked for."""
    if not HAS_CUDA or os.path.exists("/dev/nvidiactl"):
        return
    refused(1, "no GPU can be used", "generate", "-m", CHAIN, "-p", "1", "-n", "2", "--device", "cuda")
    result = run("generate", "-m", CHAIN, "-p", "1", "-n", "2", "--device", "auto", quiet=False)
    equal(result.out, b"23\n", "the CPU answers")
    check(result.err.count(b"no GPU can be used: there is none; running on the CPU\n") == 1, "and says so once", result.err)
    equal(run("generate", "-m", CHAIN, "-p", "1", "-n", "2", "--device", "auto").err, b"", "--quiet says nothing")


def test_wrong_combinations():
    refused(2, "wants one of", "generate", "-m", CHAIN)
    refused(2, "wants one of", "generate", "-m", CHAIN, "-p", "x", "--ids", "1")
    refused(2, "wants one of", "eval", "-m", CHAIN, "--ppl")
    refused(2, "--dump|--ppl", "eval", "-m", CHAIN, "--ids", "1,2")
    refused(2, "wants one of", "tokenize", "-m", CHAIN)
    refused(2, "wants one of", "tokenize", "-m", CHAIN, "-p", "x", "--decode", "1")
    refused(2, "file of prompts", "batch", "-m", CHAIN)
    refused(2, "--resume", "batch", "-m", CHAIN, "x.txt", "--resume")
    refused(2, "bench wants", "bench")
    refused(2, "bench wants", "bench", "nothing")
    refused(2, "one argument too many|stray", "bench", "memory", "stray")
    refused(2, "found stray, wanted one of all, ceilings" if HAS_CUDA else "bench wants", "bench", "gpu", "stray")
    refused(2, "--layers wants --dummy", "generate", "-m", CHAIN, "-p", "x", "--layers", "1")
    refused(2, "--dummy", "tokenize", "-m", CHAIN, "-p", "x", "--dummy")
    # An argument that a command cannot use is a mistake, not something to pass over.
    refused(2, "stray", "generate", "-m", CHAIN, "-p", "x", "stray")
    refused(2, "stray", "chat", "-m", CHAIN, "stray")
    refused(2, "stray", "inspect", "-m", CHAIN, "stray")
    refused(2, "-p", "chat", "-m", CHAIN, "-p", "hello")
    refused(2, "-p", "batch", "-m", CHAIN, "x.txt", "-p", "hello")
    refused(2, "--ppl", "generate", "-m", CHAIN, "-p", "x", "--ppl")
    refused(2, "-o", "generate", "-m", CHAIN, "-p", "x", "-o", "file")
    refused(2, "--ids", "tokenize", "-m", CHAIN, "-p", "x", "--ids", "1")
    refused(2, "--decode", "eval", "-m", CHAIN, "--ids", "1", "--ppl", "--decode", "1")


def test_bad_models():
    refused(1, "No such file", "generate", "-m", "/nonexistent", "-p", "x")
    refused(1, "config.json", "inspect", "-m", HOME)
    refused(1, "config.json", "chat", "-m", "\x1b[31m\n\u009b")
    refused(1, "max_position_embeddings", "generate", "-m", CHAIN, "-p", "x", "-c", "5000")
    broken = os.path.join(HOME, "broken")
    shutil.copytree(CHAIN, broken)
    write(os.path.join(broken, "tokenizer.json"), "{")
    refused(1, "tokenizer.json|JSON", "generate", "-m", broken, "-p", "x")
    os.remove(os.path.join(broken, "tokenizer.json"))
    refused(1, "tokenizer.json", "generate", "-m", broken, "-p", "x")
    refused(1, "tokenizer.json", "chat", "-m", broken)
    refused(1, "tokenizer.json", "tokenize", "-m", broken, "-p", "x")
    equal(generate("--ids", "49", "-n", "3", model=broken).out, b"50,51,52\n", "--ids without a tokenizer prints ids")
    data = read(os.path.join(CHAIN, "model.safetensors"))
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header["evil\x1b]0;title\x07\nname\u009b31m"] = header.pop("lm_head.weight")
    text = json.dumps(header).encode()
    write(os.path.join(broken, "model.safetensors"), struct.pack("<Q", len(text)) + text + data[8 + length:])
    result = run("inspect", "-m", broken)
    check(result.code == 1 and b"\x1b" not in result.out and b"\x07" not in result.out and b"\xc2\x9b" not in result.out,
          "names inside a checkpoint reach the terminal without control characters", result.out[-300:])


def test_inspect():
    result = run("inspect", "-m", RANDOM)
    check(result.code == 0 and not result.err, "inspect", result.err)
    for word in (b"model_type glm_moe_dsa", b"index_topk 16", b"full indexers in layers 0 1 3 5", b"model.embed_tokens.weight", b"320, 64", b"1 x 4096 bf16 rows, adaptive: cache "):
        check(word in result.out, "inspect prints", word)
    check(b"64 x 4096 bf16 rows" in run("inspect", "-m", RANDOM, "--slots", "64").out, "inspect plans for --slots")
    refused_budget = run("inspect", "-m", RANDOM, "--kv-budget", "1K")
    check(refused_budget.code == 1 and b"--kv-budget" in refused_budget.err, "inspect says that a plan does not fit", refused_budget.err)


# ---- tide generate

def test_generate():
    result = generate("-p", "1", "-n", "5")
    equal((result.code, result.out, result.err), (0, b"23456\n", b""), "-p")
    equal(generate("-f", write(HOME + "/one", "1"), "-n", "5").out, b"23456\n", "-f")
    equal(generate("--ids", "49", "-n", "5").out, b"23456\n", "--ids with a tokenizer prints text")
    equal(generate("-p", "1", "-n", "0").out, b"", "-n 0")
    equal(generate("-p", "1", "-n", "1").out, b"2\n", "-n 1")
    equal(len(generate("-p", "1").out), 257, "256 tokens by default")
    loud = generate("-p", "1", "-n", "5", quiet=False)
    check(loud.out == b"23456\n" and loud.err.count(b"\n") == 1 and b"1 x 4096 bf16 rows, resident: cache " in loud.err, "the plan goes to stderr", loud.err)
    check(b"tokens/s" in generate("-p", "1", "-n", "5", "--stats").err, "--stats")
    equal(generate("-p", "1", "-n", "5", stdin_file=subprocess.DEVNULL).out, b"23456\n", "</dev/null")
    equal(generate("-p", "1", "-n", "9", "-c", "6").out, b"234\n", "-c ends the text: 3 prompt tokens and 3 more")
    equal(generate("-p", "hi", "--chat", "-n", "3").out, b"abc\n", "--chat renders a message")
    equal(generate("-p", "hi", "--think", "on", "-n", "6").out, b"rs</think>abc\n", "--think on")
    equal(generate("-p", "hi", "--system", "be brief", "-n", "3").out, b"abc\n", "--system")
    marked = os.path.join(HOME, "marked")
    shutil.copytree(CHAIN, marked)
    tokenizer = json.loads(read(marked + "/tokenizer.json"))
    for token in tokenizer["added_tokens"]:
        token["special"] = True
    write(marked + "/tokenizer.json", json.dumps(tokenizer))
    equal(generate("-p", "hi", "--think", "on", "-n", "6", model=marked).out, b"rs</think>abc\n", "reasoning ends visibly, also where its tags are control tokens")


def test_generate_refusals():
    equal(generate("-p", "", "-n", "2").code, 0, "an empty prompt behind the tokenizer's prefix is a prompt")
    refused(1, "ids", "generate", "-m", CHAIN, "--ids", "")
    refused(1, "commas", "generate", "-m", CHAIN, "--ids", "1;2")
    refused(1, "comma", "generate", "-m", CHAIN, "--ids", "1,2,")
    refused(1, "320", "generate", "-m", CHAIN, "--ids", "1,320")
    refused(1, "320", "generate", "-m", CHAIN, "--ids", "1,2147483647", "--repeat-penalty", "1.1", "-n", "1")
    refused(1, "commas", "generate", "-m", CHAIN, "--ids", "1,-2")
    refused(1, "commas", "generate", "-m", CHAIN, "--ids", "99999999999999999999")
    refused(1, "12 tokens|context holds 8", "generate", "-m", CHAIN, "-p", "0123456789", "-c", "8")
    refused(1, "No such file", "generate", "-m", CHAIN, "-f", "/nonexistent")
    refused(1, "directory", "generate", "-m", CHAIN, "-f", "/")


def test_stop():
    for stops, wanted in [(["5"], b"234\n"), (["56"], b"234\n"), (["4567"], b"23\n"), (["99", "78", "8"], b"23456\n"), (["2"], b"\n"),
                          (["nothing"], b"234567890123\n"), (["23x", "123"], b"234567890\n")]:
        args = sum((["--stop", s] for s in stops), [])
        equal(generate("-p", "1", "-n", "12", *args).out, wanted, "--stop %s" % stops)
    equal(generate("-p", "1", "-n", "3", "--stop", "2345678").out, b"234\n", "what was held back for a stop string is printed at the end")
    equal(generate("-p", "d", "--stop", "\U0001f600").out, b"\n", "a stop string of four tokens")
    equal(generate("-p", "d", "--stop", "\U0001f601").out, "\U0001f600efg\n".encode(), "a stop string that shares three bytes")


def test_eos_and_bytes():
    equal(generate("-p", "d").out, "\U0001f600efg\n".encode(), "an emoji in four tokens, up to the end of the turn")
    equal(generate("-p", "d", "-n", "2").out, b"\xf0\x9f\n", "an unfinished character is flushed at the end")
    eos = os.path.join(HOME, "eos")
    shutil.copytree(CHAIN, eos)
    for ids, wanted in [(ord("5"), b"234\n"), ([ord("9"), ord("7")], b"23456\n"), (ord("2"), b"\n")]:
        write(eos + "/generation_config.json", json.dumps({"eos_token_id": ids}))
        equal(generate("-p", "1", "-n", "20", model=eos).out, wanted, "eos_token_id %s" % ids)
    os.remove(eos + "/tokenizer.json")
    write(eos + "/generation_config.json", json.dumps({"eos_token_id": ord("5")}))
    equal(generate("--ids", "49", model=eos).out, b"50,51,52,53\n", "without a tokenizer the last id is printed too")


def test_repeatability():
    ask = lambda *args: generate("-p", "once", "-n", "24", *args, model=RANDOM).out
    greedy = ask("--temp", "0")
    for temp in ("0", "-1", "1e-9"):
        equal(ask("--temp", temp, "--seed", "9"), greedy, "--temp %s is greedy" % temp)
    equal(ask("--temp", "1", "--top-k", "1"), greedy, "--top-k 1 is greedy")
    equal(ask("--temp", "1", "--top-p", "0"), greedy, "--top-p 0 is greedy")
    one = ask("--seed", "1")
    check(one != greedy and one != ask("--seed", "2"), "seeds differ")
    equal(ask("--seed", "1"), one, "the same seed repeats")
    equal(ask("--seed", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0"), one, "0 and 1 are off")
    equal(ask("--seed", "1", "--threads", "2"), one, "threads do not matter")
    check(ask() != ask(), "no seed: another text each time")


def test_prompt_bytes():
    ids = lambda text: run("tokenize", "-m", CHAIN, "-f", write(HOME + "/prompt", text)).out.decode().strip()
    equal(ids("a"), "97", "a")
    equal(ids("a\n"), "97,10", "the final newline of a file stays")
    equal(ids("a\r\n"), "97,13,10", "CRLF stays")
    equal(ids("a\\n"), "97,92,110", "backslash-n stays two characters")
    equal(ids(b"\x00\xff\xe6\xad"), "0,255,230,173", "NUL and invalid UTF-8 stay")
    equal(ids(""), "", "an empty file")
    trace = os.path.join(HOME, "trace.jsonl")
    for text, last in [("a", 2), ("a\n", 3), ("a\r\n", 4), (b"\xff\x00", 3)]:
        generate("-f", write(HOME + "/prompt", text), "-n", "1", "--trace", trace)
        equal(json.loads(read(trace).splitlines()[0])["sessions"][0]["anchor_pos"], last, "generate -f sees every byte of %r" % text)


def test_stdout_failures():
    """Results that cannot be written are an error of every command, once, and soon."""
    prompts = write(HOME + "/p.txt", "1\n2\n")
    for args in (["generate", "-m", CHAIN, "-p", "1", "-n", "5"], ["tokenize", "-m", CHAIN, "-p", "x"], ["tokenize", "-m", CHAIN, "--decode", "97"],
                 ["inspect", "-m", CHAIN], ["eval", "-m", CHAIN, "--ids", "49,50", "--ppl"], ["batch", "-m", CHAIN, prompts, "-n", "3"], ["--help"]):
        with open("/dev/full", "wb") as full:
            refused(1, "No space left", *args, stdout=full)
        closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", TIDE, *args], capture_output=True, env=environment(), timeout=PATIENCE)
        check(closed.returncode == 1 and (b"stdout: " in closed.stderr or b"the output: " in closed.stderr), "a closed stdout is an error", args, closed.returncode, closed.stderr)
    started = time.time()
    process = subprocess.Popen([TIDE, "generate", "-m", CHAIN, "-p", "x", "-n", "4000", "--quiet"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=environment())
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    check(process.wait() == 1 and b"Broken pipe" in err and err.count(b"\n") == 1, "a reader that leaves ends the generation", process.returncode, err)
    ours, theirs = os.pipe()                        # 4 KB of room for 8 KB of text: the write waits while Ctrl-C arrives
    fcntl.fcntl(theirs, 1031, 4096)
    process = subprocess.Popen([TIDE, "generate", "-m", CHAIN, "-p", "AB", "-n", "4000", "--quiet"], stdout=theirs, stderr=subprocess.PIPE, env=environment())
    os.close(theirs)
    limit = time.time() + PATIENCE
    while array.array("i", fcntl.ioctl(ours, termios.FIONREAD, b"\0" * 4))[0] < 4096 and time.time() < limit:
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    text = b""
    while piece := os.read(ours, 65536):
        text += piece
    os.close(ours)
    err = process.stderr.read()
    check(process.wait() == 1 and err == b"tide: interrupted\n" and 4096 < len(text) < 8000 and text == b"AB" * (len(text) // 2) + b"\n", "Ctrl-C cuts no write short", len(text), err)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    refused(1, "too large", "batch", "-m", CHAIN, write(HOME + "/p.txt", "1\n" * 50), "-o", HOME + "/limited", limits=limit)
    refused(1, "too large", "eval", "-m", CHAIN, "--ids", "1,2", "--dump", HOME + "/limited", limits=limit)
    with open("/dev/full", "wb") as full:
        check(run("chat", "-m", CHAIN, stdin=b"hi\nhi\n", stdout=full).code == 1, "chat too")
    # A file that tide opens must never become its stdout or stderr.
    trace = os.path.join(HOME, "trace.jsonl")
    subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", TIDE, "generate", "-m", CHAIN, "-p", "1", "-n", "3", "--trace", trace], env=environment(), timeout=PATIENCE)
    check(all(line.startswith(b'{"round"') for line in read(trace).splitlines()), "the trace holds the trace alone", read(trace))
    refused(1, "trace", "generate", "-m", CHAIN, "-p", "1", "--trace", "/nonexistent/trace")
    check(generate("-p", "1", "-n", "3", "--trace", "/dev/full").code == 1, "a trace that cannot be written is an error")


# ---- tide batch

def batch(text, *args, name="prompts.jsonl", model=None, **kwargs):
    path = write(os.path.join(HOME, name), text if isinstance(text, (str, bytes)) else "".join(json.dumps(row) + "\n" for row in text))
    result = run("batch", "-m", model or CHAIN, path, *args, **kwargs)
    result.rows = [json.loads(line) for line in result.out.splitlines()]
    return result


def test_batch_text():
    result = batch("1\n2\r\n\n5\nd", "-n", "4", name="p.txt")
    equal(result.code, 3, "a blank line is a failed row")
    equal([row["index"] for row in result.rows], [0, 1, 2, 3, 4], "one row for each line, in order")
    equal([row["text"] for row in result.rows], ["2345", "3456", "", "6789", "\U0001f600"], "texts")
    equal([row["finish_reason"] for row in result.rows], ["length", "length", "error", "length", "length"], "finish reasons")
    equal([(row["prompt_tokens"], row["completion_tokens"]) for row in result.rows][0], (3, 4), "token counts")
    check("line 3" in result.rows[2]["error"] and result.rows[0]["error"] is None, "the error row names its line", result.rows[2])
    check(result.err == b"", "nothing on stderr that was not asked for", result.err)
    equal([row["finish_reason"] for row in batch("d\n", name="p.txt").rows], ["stop"], "the end of a turn")
    for text, n in [("", 0), ("\n", 1), ("1", 1), ("1\n", 1), ("1\r\n", 1), ("\r\n1", 2)]:
        equal(len(batch(text, "-n", "1", name="p.txt").rows), n, "rows of %r" % text)
    equal(batch("", name="p.txt").code, 0, "an empty file is done")
    equal(batch("1\n", "-n", "0", name="p.txt").rows[0]["completion_tokens"], 0, "-n 0")
    refused(1, "No such file", "batch", "-m", CHAIN, "/nonexistent.txt")
    refused(1, "directory", "batch", "-m", CHAIN, "/")
    refused(1, "No such file", "batch", "-m", CHAIN, HOME + "/p.txt", "-o", "/nonexistent/out")


def test_batch_errors():
    rows = [b'{"prompt": "1"}', b"", b"   ", b'{"prompt": "1"', b"[1]", b'"1"', b"{}", b'{"prompt": 1}', b'{"prompt": "1", "messages": []}', b'{"messages": 5}',
            b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": "king", "content": "x"}]}', b'{"prompt": "\xff\xfe"}', b"\xed\xa0\x80",
            b'{"prompt": "' + b"a" * 5000 + b'"}', b'{"prompt": "1", "n": -1}', b'{"prompt": "1", "n": 1e99}', b'{"prompt": "1", "n": "x"}', b'{"prompt": "1", "temp": "hot"}',
            b'{"prompt": "1", "seed": -1}', b'{"prompt": "1", "seed": 1.5}', b'{"prompt": "1", "stop": 5}', b'{"prompt": "1", "stop": ["a", 5]}', b'{"prompt": "1", "stop": ""}',
            b'{"prompt": "a\\u0000b"}', b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}', b'{"prompt": "\\ud800"}', b"[" * 3000, b'{"messages": [5]}', b'{"prompt": "1"} x',
            b'{"prompt": "2"}']
    result = batch(b"\n".join(rows) + b"\n", "-n", "3")
    equal(result.code, 3, "some rows failed")
    equal([row["index"] for row in result.rows], list(range(len(rows))), "every row is answered, in order")
    equal((result.rows[0]["text"], result.rows[-1]["text"]), ("234", "345"), "good rows are unharmed")
    for i, row in enumerate(result.rows[1:-1], 1):
        check(row["finish_reason"] == "error" and row["error"] and "line %d:" % (i + 1) in row["error"], "an error row that names line %d" % (i + 1), rows[i], row)
    result = batch(b"1\n\xff\xfe\n" + b"a" * 5000 + b"\n2\n", "-n", "3", name="p.txt")
    equal(([row["finish_reason"] for row in result.rows], result.code), (["length", "error", "error", "length"], 3), "the same in a .txt")
    check("5002 tokens" in result.rows[2]["error"] and "4096" in result.rows[2]["error"], "an over-long row says how long", result.rows[2])


def make_mute(model):
    """The same model without a tokenizer: generate prints ids."""
    if not os.path.isdir(model + "-mute"):
        shutil.copytree(model, model + "-mute")
        os.remove(model + "-mute/tokenizer.json")
    return model + "-mute"


def test_batch_overrides():
    rows = [{"prompt": "1", "n": 2}, {"prompt": "1", "stop": "56"}, {"prompt": "1", "stop": ["9", "4"]}, {"prompt": "1"}, {"prompt": "1", "n": None, "stop": None},
            {"messages": [{"role": "user", "content": "hi"}], "n": 4}, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
             {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}], "n": 3}, {"prompt": "a\\u0000 \\\\u0000 \u2028", "n": 1}, {"prompt": "1", "unknown": {"x": [1]}, "n": 1}]
    result = batch(rows, "-n", "6", "--stop", "0")
    equal([row["text"] for row in result.rows], ["23", "234", "23", "234567", "234567", "abcd", "abc", "x", "2"], "per-row n and stop, messages")
    equal([row["finish_reason"] for row in result.rows][:4], ["length", "stop", "stop", "length"], "finish reasons")
    equal(result.code, 0, "all rows done")
    rows = [{"prompt": "once", "seed": 7}, {"prompt": "once", "temp": 0}, {"prompt": "once", "seed": 7}, {"prompt": "once"}, {"prompt": "once", "seed": 8}]
    texts = [row["ids"] for row in batch(rows, "-n", "20", "--seed", "3", model=RANDOM).rows]
    equal(texts[0], texts[2], "rows of one prompt and one seed of their own give one text")
    check(texts[0] != texts[4] and texts[3] != texts[0] and texts[1] != texts[0], "and others do not")
    ids = "1,2,3"
    prompt = run("tokenize", "-m", RANDOM, "--decode", ids).out[:-1].decode()
    single = run("generate", "-m", make_mute(RANDOM), "--ids", ",".join(map(str, PREFIX)) + "," + ids, "-n", "20", "--seed", "7").out.decode().strip()
    own = batch([{"prompt": prompt, "seed": 7}], "-n", "20", model=RANDOM).rows[0]["ids"]       # may end at a control token, single does not
    check(len(own) > 5 and single.startswith(",".join(map(str, own))), "a row's own seed gives what generate gives", own, single)
    equal(batch(rows[1:2], "-n", "20", model=RANDOM).rows[0]["ids"], texts[1], "a row's temp")


def make_broken_numbers():
    """The chain with a NaN where the token z is embedded."""
    directory = os.path.join(HOME, "nan")
    if not os.path.isdir(directory):
        shutil.copytree(CHAIN, directory)
        data = bytearray(read(directory + "/model.safetensors"))
        length = struct.unpack("<Q", data[:8])[0]
        start = 8 + length + json.loads(bytes(data[8:8 + length]))["model.embed_tokens.weight"]["data_offsets"][0]
        struct.pack_into("<f", data, start + 4 * (ord("z") * VOCAB + 5), float("nan"))
        write(directory + "/model.safetensors", bytes(data))
    return directory


def test_broken_numbers():
    model = make_broken_numbers()
    refused(1, "layer 0|position 3|not finite", "generate", "-m", model, "-p", "1z")
    refused(1, "not finite", "eval", "-m", model, "--ids", "49,122", "--ppl")
    for slots in ("1", "2", "8"):
        result = batch("1\nz\n2\n3z3\n4\nd\n", "-n", "5", "--slots", slots, name="p.txt", model=model)
        equal(([row["text"] for row in result.rows], result.code), (["23456", "", "34567", "", "56789", "\U0001f600e"], 3), "other rows lose nothing, --slots " + slots)
        check(all("line %d: " % (i + 1) in result.rows[i]["error"] and "not finite" in result.rows[i]["error"] for i in (1, 3)), "the row says why", result.rows[1])
    result = chat("hi\nz\nhi\n", model=model)
    equal((result.code, result.out), (0, ANSWER + b"\n" + ANSWER), "a chat goes on where it was")
    check(b"taken back" in result.err and result.err.count(b"\n") == 1, "and says so", result.err)


def test_small_vocabulary():
    """A tokenizer that knows more tokens than the model."""
    model = os.path.join(HOME, "small")
    shutil.copytree(CHAIN, model)
    tokenizer = json.loads(read(model + "/tokenizer.json"))
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=VOCAB, content="<|extra|>"))
    tokenizer["model"]["vocab"]["IJ"] = VOCAB + 1
    tokenizer["model"]["merges"].append("I J")
    write(model + "/tokenizer.json", json.dumps(tokenizer))
    refused(1, "321|320", "generate", "-m", model, "-p", "IJ")
    refused(1, "321|320", "eval", "-m", model, "-f", write(HOME + "/ij", "xIJx"), "--ppl")
    result = batch("1\nIJ\n2\n", "-n", "2", name="p.txt", model=model)
    equal([row["text"] for row in result.rows], ["23", "", "34"], "the row alone fails")
    equal(chat("hi\nIJ\nhi\n", model=model).out.replace(b"\n\n", b"\n"), ANSWER * 2, "the turn alone fails")


def test_batch_bar():
    path = write(HOME + "/p.txt", "1\n2\n3\n4\n")
    terminal = Terminal("batch", "-m", CHAIN, path, "-n", "5", "-o", HOME + "/barred.jsonl", quiet=False)
    equal(terminal.end(), 0, "exit")
    check(b"] 4/4 rows, " in terminal.seen and terminal.seen.endswith(b" tokens/s\r\n"), "a bar on a terminal", terminal.seen)
    terminal = Terminal("batch", "-m", CHAIN, path, "-n", "5", "-o", HOME + "/barred.jsonl")
    equal((terminal.end(), terminal.seen), (0, b""), "none with --quiet")
    check(b"] 4/4" not in run("batch", "-m", CHAIN, path, "-n", "5", quiet=False).err, "none elsewhere")


def test_batch_slots():
    rows = [{"prompt": "once upon " + "abc" * (i % 5) + str(i), "n": 3 + 7 * i % 23} for i in range(17)]
    first = batch(rows, "--seed", "5", "--slots", "1", model=RANDOM)
    equal([row["index"] for row in first.rows], list(range(17)), "rows in order")
    for slots in ("2", "3", "8", "64"):
        equal(batch(rows, "--seed", "5", "--slots", slots, model=RANDOM).rows, first.rows, "the same with --slots " + slots)
    others = rows[:]
    for i in range(0, 17, 2):
        others[i] = {"prompt": "something else " * (i + 1), "n": 30}
    found = batch(others, "--seed", "5", "--slots", "4", model=RANDOM)
    equal(found.rows[1::2], first.rows[1::2], "the same whatever the neighbours")
    check(batch(rows, model=RANDOM).rows != batch(rows, model=RANDOM).rows, "no seed: other texts")


def start_batch(path, out, *args):
    return subprocess.Popen([TIDE, "batch", "-m", RANDOM, path, "-o", out, "--seed", "5", "--slots", "3", "--quiet", *args], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment())


def wait_for_rows(path, n):
    limit = time.time() + PATIENCE
    while time.time() < limit and not (os.path.exists(path) and read(path).count(b"\n") >= n):
        time.sleep(0.002)


def test_batch_resume():
    ROWS = 18 if SANITIZED else 42
    path = write(HOME + "/many.jsonl", "".join(json.dumps({"prompt": "row %d" % i, "n": 150}) + "\n" for i in range(ROWS - 2)) + "\nbad\n")
    whole, part = HOME + "/whole.jsonl", HOME + "/part.jsonl"
    process = start_batch(path, whole)
    process.communicate()
    equal((process.returncode, read(whole).count(b"\n")), (3, ROWS), "an uninterrupted run")
    process = start_batch(path, part)
    wait_for_rows(part, 4)
    process.kill()
    process.communicate()
    rows = read(part).count(b"\n")
    check(4 <= rows < ROWS and read(whole).startswith(read(part)[:read(part).rfind(b"\n") + 1]), "rows are written one by one", rows)
    lines = read(whole).splitlines(True)
    for cut in (len(lines[rows]) - 1, len(lines[rows]) // 2, 12, 1, 0):     # the last line without its newline, and less
        write(part, b"".join(lines[:rows]) + lines[rows][:cut])
        process = start_batch(path, part, "--resume")
        process.communicate()
        equal((process.returncode, read(part) == read(whole)), (3, True), "--resume after a kill in a row, %d bytes in" % cut)
    process = start_batch(path, part, "--resume")
    equal((process.communicate()[1], process.returncode, read(part) == read(whole)), (b"", 3, True), "--resume of a finished file")
    os.remove(part)
    process = start_batch(path, part, "--resume")
    process.communicate()
    check(read(part) == read(whole), "--resume without a file starts one")
    os.remove(part)
    process = start_batch(path, part)
    wait_for_rows(part, 2)
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    check(process.returncode == 1 and b"interrupted" in err and err.count(b"\n") == 1, "Ctrl-C ends the batch, with one line", process.returncode, err)
    process = start_batch(path, part, "--resume")
    process.communicate()
    check(read(part) == read(whole), "--resume after Ctrl-C")
    for foreign in (b"my diary\n", b"my diary", b'{"x', b'{"index": 0}', b'{"index":0,"text":"x"}\n', b'{"index":0,"text":"x"}\nmy diary', b'{"index":1,"text":"x"}\n', b"\x00" * 100, lines[0] + lines[0], lines[0] + lines[2][:20],
                    b"".join(lines) + lines[0], b"".join(lines) + b'{"index":%d,"text":"' % ROWS):
        write(part, foreign)
        refused(1, "not touched", "batch", "-m", RANDOM, path, "-o", part, "--resume")
        equal(read(part), foreign, "a foreign file is left alone")
    before = read(path)
    refused(1, "prompts", "batch", "-m", RANDOM, path, "-o", path)
    os.link(path, HOME + "/link.jsonl")
    refused(1, "prompts", "batch", "-m", RANDOM, path, "-o", HOME + "/link.jsonl")
    equal(read(path), before, "the prompts are not their own output")


# ---- tide eval, tide tokenize

def test_eval():
    result = run("eval", "-m", CHAIN, "--ids", "49,50,51,52", "--ppl")
    report = json.loads(result.out)
    check(result.code == 0 and abs(report["perplexity"] - 1) < 1e-4 and report["tokens"] == 3, "a certain text", result.out)
    report = json.loads(run("eval", "-m", CHAIN, "--ids", "49,57", "--ppl").out)
    check(17 < report["nll"] < 19, "an impossible one", report)
    text = write(HOME + "/long", "the quick brown fox " * 60)
    for context in ("64", "100", "4096"):
        result = run("eval", "-m", RANDOM, "-f", text, "--ppl", "-c", context)
        report = json.loads(result.out)
        check(report["tokens"] == 1200 and 50 < report["perplexity"] < 5000 and report["context"] == int(context), "windows of " + context, result.out)
    equal(json.loads(run("eval", "-m", RANDOM, "-f", text, "--ppl", "-c", "4").out)["tokens"], 1200, "windows of two tokens")
    refused(1, "context", "eval", "-m", RANDOM, "-f", text, "--ppl", "-c", "2")
    refused(1, "context", "eval", "-m", RANDOM, "-f", text, "--dump", HOME + "/d", "-c", "100")
    refused(1, "at least", "eval", "-m", CHAIN, "--ids", "1", "--ppl")
    refused(1, "320", "eval", "-m", CHAIN, "--ids", "1,5000", "--ppl")
    process = subprocess.Popen([TIDE, "eval", "--device", "cpu", "-m", RANDOM, "-f", write(HOME + "/longer", "the quick brown fox " * 2000), "--ppl"], stderr=subprocess.PIPE, env=environment())
    process.stderr.readline()                       # the plan
    process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    equal((process.wait(), err), (1, b"tide: interrupted\n"), "Ctrl-C ends an evaluation")
    refused(1, "320", "eval", "-m", CHAIN, "--ids", "1,2", "--decode", "320", "--dump", HOME + "/d")
    refused(1, "No such file", "eval", "-m", CHAIN, "--ids", "1,2", "--dump", "/nonexistent/d")
    refused(1, "No space", "eval", "-m", CHAIN, "--ids", "1,2", "--dump", "/dev/full")
    dump = HOME + "/dump.safetensors"
    result = run("eval", "-m", RANDOM, "--ids", ",".join(str(i) for i in range(1, 41)), "--decode", "7,8", "--dump", dump)
    equal((result.code, result.out, result.err), (0, b"", b""), "--dump")
    data = read(dump)
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    shapes = {name: entry["shape"] for name, entry in header.items()}
    wanted = {"input_ids": [40], "decode_ids": [2], "logits": [40, 320], "decode_logits": [2, 320]} | {"hidden.%d" % i: [40, 64] for i in range(7)} | {
        "topk.%d" % i: [40, 16] for i in (0, 1, 3, 5)}
    equal(shapes, wanted, "the dump's tensors")
    equal(len(data), 8 + length + max(entry["data_offsets"][1] for entry in header.values()), "the dump's size")


def tokenize(*args):
    return run("tokenize", "-m", CHAIN, *args)


def test_tokenize():
    equal(tokenize("-p", "aAB").out, b"97,257\n", "-p")
    equal(tokenize("-p", "").out, b"\n", "an empty text")
    marked = "a<|user|>b"
    equal(tokenize("-p", marked).out.decode().strip(), ",".join(str(b) for b in marked.encode()), "control tokens in a text stay text")
    equal(tokenize("-p", marked, "--special", "off").out, tokenize("-p", marked).out, "--special off is the default")
    equal(tokenize("-p", marked, "--special", "on").out.decode().strip(), "97,%d,98" % TOKEN["<|user|>"], "--special on")
    equal(tokenize("--decode", "97,257,%d,240,159,152,128" % TOKEN["<|user|>"]).out, "aAB<|user|>\U0001f600\n".encode(), "--decode")
    equal(tokenize("--decode", "255,0").out, b"\xff\x00\n", "--decode of any bytes")
    refused(1, "320", "tokenize", "-m", CHAIN, "--decode", "320")
    refused(1, "commas", "tokenize", "-m", CHAIN, "--decode", "x")
    refused(1, "comma", "tokenize", "-m", CHAIN, "--decode", "1,")
    rows = [{"text": "aAB"}, {"text": ""}, {"text": "<sop>"}, {"messages": [{"role": "user", "content": "hi<|user|>"}], "add_generation_prompt": True, "enable_thinking": False}]
    path = write(HOME + "/t.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    result = tokenize("--jsonl", path)
    answers = [json.loads(line) for line in result.out.splitlines()]
    equal((result.code, answers[:3]), (0, [[97, 257], [], list(b"<sop>")]), "--jsonl texts")
    check(answers[3]["ids"][:3] == PREFIX + [TOKEN["<|user|>"]] and answers[3]["ids"].count(TOKEN["<|user|>"]) == 1 and answers[3]["prompt"].startswith("[gMASK]<sop><|user|>"),
          "--jsonl messages", answers[3])
    equal(json.loads(tokenize("--jsonl", path, "--special", "on").out.splitlines()[2]), [TOKEN["<sop>"]], "--jsonl --special on")
    alone = os.path.join(HOME, "alone")
    os.mkdir(alone)
    shutil.copy(CHAIN + "/tokenizer.json", alone)
    equal(run("tokenize", "-m", alone, "-p", "aAB").out, b"97,257\n", "tokenizer.json alone is enough")
    for bad in ("{", "[]", "5", '{"text": 5}', '{"messages": 5}', '{"text": "a\\u0000b"}', '{"messages": [{"role": "x", "content": "y"}]}', ""):
        write(path, '{"text": "a"}\n' + bad + "\n")
        result = tokenize("--jsonl", path)
        check(result.code == 1 and result.out == b"[97]\n" and b"line 2" in result.err and result.err.count(b"\n") == 1, "a bad row is named", bad, result.err)


# ---- tide chat without a terminal

ANSWER = "abcd\U0001f600efg\n".encode()


def chat(text, *args, model=None, **kwargs):
    return run("chat", "-m", model or CHAIN, *args, stdin=text if isinstance(text, bytes) else text.encode(), **kwargs)


def test_chat_pipe():
    for text, answers in [("", 0), ("hi\n", 1), ("hi", 1), ("hi\nthere\n", 2), ("\n\n", 0), ("hi\r\nthere\r\n", 2), ("hi\n/quit\nthere\n", 1), ("  \t\n", 0), ("\x00\n", 1)]:
        result = chat(text)
        equal((result.code, result.out, result.err), (0, ANSWER * answers, b""), "input %r" % text)
    equal(chat("hi\n", env={"TERM": "dumb"}).out, ANSWER, "TERM=dumb")
    equal(chat("hi\n", env={"LANG": "C", "LC_ALL": "C"}).out, ANSWER, "LC_ALL=C")
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", TIDE, "chat", "-m", CHAIN, "--quiet"], capture_output=True, env=environment(), timeout=PATIENCE)
    equal((closed.returncode, closed.stdout, closed.stderr), (0, b"", b""), "a closed stdin")
    equal(chat("hi\n", "--think", "on").out, b"rs</think>" + ANSWER, "--think on")
    equal(chat("hi\n", "-n", "3").out, b"abc\n", "-n")
    equal(chat("hi\n", "--stop", "d").out, b"abc\n", "--stop")
    long = chat(b"q" * 100000 + b"\nhi\n")
    equal((long.code, long.out), (0, ANSWER), "a message of 100 KB is refused, the next answered")
    check(re.search(rb"message has 1000\d\d tokens", long.err) and long.err.count(b"\n") == 1, "by its number of tokens", long.err)
    plain = os.path.join(HOME, "plain")
    shutil.copytree(CHAIN, plain)
    tokenizer = json.loads(read(plain + "/tokenizer.json"))
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<sop>"]
    write(plain + "/tokenizer.json", json.dumps(tokenizer))
    refused(1, "chat format", "chat", "-m", plain, stdin=b"hi\n")


def test_effort():
    """--effort and /effort: rendered as the checkpoint says it, kept with the conversation, refused by name."""
    model = os.path.join(HOME, "effort")
    shutil.copytree(CHAIN, model)
    write(model + "/tokenizer_config.json", json.dumps({"chat_template": "Reasoning Effort: High Max enable_thinking"}))
    row = write(HOME + "/effort.jsonl", json.dumps({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}) + "\n")
    for level, word in ((None, "Max"), ("high", "High"), ("max", "Max")):
        result = run("tokenize", "-m", model, "--jsonl", row, *(("--effort", level) if level else ()))
        equal(json.loads(result.out)["prompt"], "[gMASK]<sop><|system|>Reasoning Effort: %s<|user|>hi<|assistant|><think>" % word, "effort %s" % level)
    equal(generate("-p", "hi", "--effort", "high", "-n", "6", model=model).out, b"rs</think>abc\n", "--effort has the model think")
    equal(generate("-p", "hi", "--effort", "high", "--think", "off", "-n", "3", model=model).out, b"abc\n", "--think off is heeded")
    equal(chat("/effort high\nhi\n", model=model).out, b"rs</think>" + ANSWER, "/effort has it think")
    saved = os.path.join(HOME, "effort.tide")
    def in_use(text, *args):
        return re.search(rb"(\d+) of \d+ tokens in use", chat(text + "/stats\n", *args, model=model).err).group(1)
    high, most = in_use("/effort high\nhi\n/save %s\n" % saved), in_use("/think on\nhi\n")
    equal(int(high) - int(most), 1, "\"High\" is a byte more than \"Max\"")
    equal(in_use("/load %s\n/clear\nhi\n" % saved), high, "a conversation keeps its effort")
    equal(in_use("hi\n/effort max\nhi\n"), most, "/effort starts anew")
    result = chat("/effort\n/effort low\n/effort x\x1b\nhi\n", model=model)
    equal((result.out, b'found "", wanted low, high or max' in result.err, b'effort low: its chat template has no "Low"' in result.err), (ANSWER, True, True), "/effort")
    check(b"\x1b" not in result.err, "control characters are not echoed", result.err)
    refused(1, 'effort low: its chat template has no "Low"', "generate", "-m", model, "-p", "hi", "--effort", "low")
    refused(1, "effort max: its chat format has no efforts", "chat", "-m", CHAIN, "--effort", "max", stdin=b"hi\n")
    refused(1, "has no efforts", "tokenize", "-m", os.path.join(ROOT, "tests", "fixtures", "tokenizer-deepseek-v32"), "--jsonl", row, "--effort", "max")
    refused(2, "--effort", "generate", "-p", "hi", "--effort", "medium")


def test_chat_context():
    result = chat("hi\nhi\nhi\nhi\n/clear\nhi\n", "-c", "32")
    check(result.code == 0 and (b"full" in result.err or b"fit" in result.err), "a full context is noticed", result.err)
    check(result.out.endswith(ANSWER), "after /clear there is room again", result.out)
    check(b"/clear" in result.err, "the notice says what to do", result.err)
    result = chat("hi\nmore\n/regen\n/clear\nhi\n", "-c", "9")
    check(result.out.startswith(b"ab\n") and result.code == 0 and b"the context of 9 tokens is full" in result.err, "an answer cut by the context", result.out, result.err)


def test_chat_commands():
    result = chat("/help\n/stats\n/nonsense\n/temp\n/temp x\n/temp 1e39\n/temp nan\n/temp 0.5 \n/think\n/think perhaps\n/think on\n/save\n/load\n/regen\n/system\n/\n/clear\n")
    equal((result.code, result.out), (0, b""), "commands print to stderr only")
    for words in (b"/regen ", b"tokens in use", b"no command /nonsense", b'/temp: found "x"', b'/temp: found ""', b'/temp: found "1e39"', b'/temp: found "nan"',
                  b'/think: found "perhaps"', b'/think: found ""', b"/save wants a file", b"/load wants a file", b"no answer to regenerate"):
        check(words in result.err, "a message says", words, result.err)
    check(b'"0.5' not in result.err, "spaces behind an argument do not matter", result.err)
    equal(chat("/bad\x1b[31m\x9b\x07\n/temp \x1bx\n/think \x1bx\n/load /none\x1b\n").code, 0, "control characters are not echoed")
    equal(chat("hi\n/regen\n/regen\n").out, ANSWER * 3, "/regen")
    equal(chat("/think on\nhi\n/think off\nhi\n").out, b"rs</think>" + ANSWER * 2, "/think")
    equal(chat("/think on \nhi\n").out, b"rs</think>" + ANSWER, "/think with a space behind")
    equal(chat("hi\n/system be brief\nhi\n/system\nhi\n").out, ANSWER * 3, "/system")
    equal(chat("/clear\nhi\n/clear\n/clear\nhi\n").out, ANSWER * 2, "/clear")
    equal(chat("/quit \nhi\n").out, b"", "/quit with a space behind")
    one, two = chat("once\n/regen\n", "--seed", "4", model=RANDOM).out, chat("once\n/regen\n", "--seed", "4", model=RANDOM).out
    equal(one, two, "a seeded chat repeats")
    plain, system = chat("once\n", "--temp", "0", model=RANDOM).out, chat("/system s\nonce\n", "--temp", "0", model=RANDOM).out
    check(plain != system, "/system changes the prompt")
    equal(chat("/temp 0\nonce\n", model=RANDOM).out, plain, "/temp 0")
    equal(chat("once\n", "--temp", "0", "--system", "s", model=RANDOM).out, system, "--system is /system")


def test_chat_reuse():
    counts = lambda err: [tuple(map(int, m)) for m in re.findall(rb"(\d+) tokens evaluated, (\d+) re-used, (\d+) generated", err)]
    for model in (CHAIN, RANDOM):
        first, second, again = counts(chat("hello\nmore\n/regen\n", "--stats", "--seed", "1", "-n", "20", model=model).err)
        rows = first[0] + first[2] - 1              # the last token of an answer has not been run yet
        equal(first[1], 0, "turn 1 starts with nothing")
        equal(second[1], rows, "turn 2 re-uses every row of turn 1")
        check(second[0] < 20, "and evaluates the new message only", second)
        equal(again[0], 1, "/regen evaluates one token")
        equal(again[0] + again[1], second[0] + second[1], "of the same prompt")


def saved_header(path):
    """What a session file says of itself (engine.c, "Sessions at rest")."""
    data = read(path)
    length = struct.unpack("<Q", data[16:24])[0]
    return json.loads(data[24:24 + length])


def test_chat_save():
    save = HOME + "/talk.json"
    script = "once upon\n/save %s\nmore\n" % save
    full = chat(script, "--temp", "0", "-n", "30", model=RANDOM).out
    answers = len(chat("once upon\n", "--temp", "0", "-n", "30", model=RANDOM).out)
    equal(chat("/load %s\nmore\n" % save, "-n", "30", model=RANDOM).out, full[answers:], "/load in a new process continues with the same answer")
    equal(chat("/load %s\n/regen\n" % save, "-n", "30", model=RANDOM).out, full[:answers], "/regen after /load")
    chat("once\n/save %s\n" % save, "--seed", "11", "-n", "30", model=RANDOM)
    more = chat("once\nmore\n", "--seed", "11", "-n", "30", model=RANDOM).out
    check(more.endswith(chat("/load %s\nmore\n" % save, "-n", "30", model=RANDOM).out), "with its seed, so at any temperature")
    chat("/think on\n/system be brief\nhi\n/save %s \n" % save, "-n", "30", "--seed", "12")
    equal(chat("/load %s\n/regen\nhi\n" % save).out, b"rs</think>" + ANSWER + b"rs</think>" + ANSWER, "settings are kept")
    good = read(save)
    bad = HOME + "/bad.json"
    places = [*range(0, len(good) - 8, max(1, len(good) // 300)), *range(len(good) - 8, len(good)), *range(100)]
    for n, i in enumerate(places):                  # single flipped bits, in one conversation
        write(HOME + "/flip%d" % n, good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1:])
    result = chat("hi\n" + "".join("/load %s/flip%d\n" % (HOME, n) for n in range(len(places))) + "/kv\n")
    equal(result.err.count(b"\n"), len(places) + 1, "one line for each refusal")
    check(b"loaded" not in result.err, "a flipped bit is refused", [line for line in result.err.splitlines() if b"loaded" in line][:5])
    for n in range(len(places)):
        os.remove(HOME + "/flip%d" % n)
    for content in [b"", b"{", b"my diary", good[:len(good) // 2], good[:-2], good + good, b"\x00" * 50, good[:24], good[:16] + b"\xff" * 8 + good[24:]]:
        write(bad, content)
        result = chat("hi\n/load %s\n/regen\nhi\n" % bad)
        equal((result.code, result.out), (0, ANSWER * 3), "a file that is no session leaves the conversation as it was")
        check(result.err.count(b"\n") == 1 and b"loaded" not in result.err and bad.encode() in result.err, "refused in one line that names it", content[:60], result.err)
    equal(read(save), good, "loading does not change the file")
    result = chat("/load %s\n" % save, model=RANDOM)
    check(b"loaded" not in result.err and b"checkpoint" in result.err, "a session of another model is refused", result.err)
    result = chat("/load %s\n" % save, "-c", "16")
    check(b"loaded" not in result.err and b"context of 16" in result.err, "a session longer than the context is refused", result.err)
    os.mkfifo(HOME + "/fifo")
    before = sorted(os.listdir(HOME))
    result = chat("hi\n/save /nonexistent/x\n/save %s\n/save %s/fifo\nhi\n" % (HOME, HOME))
    equal((result.out, result.err.count(b"\n"), result.err.count(b"saved")), (ANSWER * 2, 3, 0), "a file that cannot be written is named")
    equal((sorted(os.listdir(HOME)), os.path.exists(HOME + ".partial")), (before, False), "nothing is left behind")
    check(not os.path.isfile(HOME + "/fifo"), "what is no regular file is not replaced")
    chat("/save %s\n" % bad)
    check(b"loaded" in chat("hi\n/load %s\nhi\n" % bad).err, "an empty conversation can be saved and loaded")


def test_session_option():
    """--session takes up the file where there is one, and writes it at the end."""
    path = HOME + "/story"
    common = ("-m", RANDOM, "--temp", "0.9", "--seed", "5")
    full = run("generate", *common, "-n", "60", "-p", "once upon").out
    first = run("generate", *common, "-n", "25", "-p", "once upon", "--session", path)
    second = run("generate", "-m", RANDOM, "-n", "35", "--session", path, "--stats", "--kv", "hisparse")
    equal(first.out[:-1] + second.out, full, "25 tokens and 35 later are the 60 of one run, with the settings that were saved")
    equal(int(re.search(rb"rounds, (\d+) rows", second.err).group(1)), 35, "no row is run again")
    header = saved_header(path)
    check(header["rows"] == len(header["ids"]) - 1, "all rows but the last id's are in the file", header["rows"], len(header["ids"]))
    before = read(path)
    equal(run("generate", "-m", RANDOM, "-n", "0", "--session", path).code, 0, "nothing to generate")
    equal(read(path), before, "and nothing written")
    for arguments in (("-m", CHAIN), ("-m", RANDOM, "--kv-dtype", "fp8"), ("-m", RANDOM, "--index-topk", "4"), ("-m", RANDOM, "-c", "64")):
        refused(1, path, "generate", *arguments, "-n", "3", "--session", path)
        equal(read(path), before, "and left as it was")
    equal(run("generate", "-m", RANDOM, "-n", "10", "--session", path, "-p", " and then", "--temp", "0").code, 0, "a prompt behind a session")
    grown = saved_header(path)
    check(grown["ids"][:len(header["ids"])] == header["ids"] and len(grown["ids"]) > len(header["ids"]) + 10, "a prompt goes on from what is there", len(grown["ids"]))
    equal(grown["temperature"], 0, "an option given now replaces the saved one")
    talk = HOME + "/talk"
    once = chat("hi\nagain\n", "-n", "20", "--temp", "0", model=RANDOM).out
    a = chat("hi\n", "-n", "20", "--temp", "0", "--session", talk, model=RANDOM).out
    b = chat("again\n", "-n", "20", "--session", talk, model=RANDOM).out
    equal(a + b, once, "a conversation in two sittings")
    equal(chat("/regen\n", "-n", "20", "--session", talk, model=RANDOM).out, b, "/regen in a third")
    write(HOME + "/diary", "dear diary")
    result = chat("hi\n", "--session", HOME + "/diary", model=RANDOM)
    equal((result.code, result.out, read(HOME + "/diary")), (1, b"", b"dear diary"), "chat refuses what is no session, and leaves it alone")
    refused(2, "batch cannot use --session", "batch", "-m", RANDOM, HOME + "/diary", "--session", talk)


# ---- tide chat on a terminal

class Terminal:
    """tide on a pseudo-terminal. What it prints is collected in self.seen."""

    def __init__(self, *args, env=None, quiet=True):
        self.master, self.slave = os.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""
        def take_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        self.process = subprocess.Popen([TIDE, *args] + (["--quiet"] if quiet else []), stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment(env),
                                        preexec_fn=take_terminal)

    def send(self, data):
        data = data if isinstance(data, bytes) else data.encode()
        while data:
            self.pump(0)
            if select.select([], [self.master], [], 1)[1]:
                data = data[os.write(self.master, data[:512]):]

    def pump(self, seconds):
        if select.select([self.master], [], [], seconds)[0]:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                pass

    def expect(self, wanted, what=None):
        """Waits for the bytes (or pattern) and drops everything up to their end."""
        limit = time.time() + PATIENCE
        pattern = wanted if isinstance(wanted, re.Pattern) else re.compile(re.escape(wanted if isinstance(wanted, bytes) else wanted.encode()))
        while time.time() < limit:
            found = pattern.search(self.seen)
            if found:
                before, self.seen = self.seen[:found.start()], self.seen[found.end():]
                return before
            self.pump(0.05)
            if self.process.poll() is not None and not select.select([self.master], [], [], 0)[0] and not pattern.search(self.seen):
                break
        check(False, "the terminal shows %r" % (what or wanted), self.seen[-400:])
        return b""

    def prompt(self):
        self.expect("> ")

    def settle(self):
        """Until nothing more is printed for a while."""
        last = None
        while last != len(self.seen):
            last = len(self.seen)
            self.pump(0.3)

    def end(self):
        """Waits for the exit; returns its status. The terminal must be as it was."""
        limit = time.time() + PATIENCE
        while self.process.poll() is None and time.time() < limit:
            self.pump(0.02)
        if self.process.poll() is None:
            check(False, "the program ends", self.seen[-300:])
            self.process.kill()
            self.process.wait()
        while select.select([self.master], [], [], 0.05)[0]:
            self.pump(0)
        equal(termios.tcgetattr(self.slave), self.before, "terminal modes are restored")
        os.close(self.master)
        os.close(self.slave)
        return self.process.returncode


def test_terminal_basics():
    terminal = Terminal("chat", "-m", CHAIN, quiet=False)
    terminal.expect("/help")
    terminal.prompt()
    terminal.send("hi\r")
    terminal.expect("abcd\U0001f600efg")
    terminal.prompt()
    terminal.send("\x1b[A\r")                       # up: the last line again
    terminal.expect("hi")
    terminal.expect("abcd\U0001f600efg")
    terminal.prompt()
    terminal.send("\x03")
    terminal.prompt()
    terminal.send("dropped\x03")
    terminal.prompt()
    terminal.send("\x04")
    equal(terminal.end(), 0, "Ctrl-D leaves")
    check(b"\x1b[?2004l" in terminal.seen, "bracketed paste is turned off", terminal.seen)
    check(oct(os.stat(HOME + "/.tide_history").st_mode & 0o777) == "0o600", "what one types is nobody else's")
    terminal = Terminal("chat", "-m", CHAIN)
    terminal.prompt()
    terminal.send("\x1b[A\r")
    terminal.expect("abcd", "history of the last run")
    terminal.prompt()
    terminal.send("/quit\r")
    equal(terminal.end(), 0, "/quit leaves")


def message_ids(terminal, save):
    """The ids of the first user message, by way of /save."""
    terminal.send("/save %s\r" % save)
    terminal.expect(re.compile(rb"saved [^\n]*tokens"))
    ids = saved_header(save)["ids"]
    begin = ids.index(TOKEN["<|user|>"]) + 1
    return bytes(ids[begin:ids.index(TOKEN["<|assistant|>"])])


def test_terminal_paste():
    text = "one\ntwo\n\n\tthr\u00e9e \u4f60\u597d\nfour \U0001f469\u200d\U0001f4bb"
    save = HOME + "/pasted.json"
    for bracketed in (True, False):
        terminal = Terminal("chat", "-m", CHAIN)
        terminal.prompt()
        pasted = text.replace("\t", "") if not bracketed else text
        terminal.send("\x1b[200~" + pasted.replace("\n", "\r") + "\x1b[201~\r" if bracketed else pasted.replace("\n", "\r") + "\r")
        terminal.expect("abcd\U0001f600efg")
        terminal.prompt()
        terminal.settle()
        equal(message_ids(terminal, save).strip(b"\n").decode(), pasted, "five pasted lines, %s brackets" % ("with" if bracketed else "without"))
        terminal.prompt()
        terminal.send("/stats\r\x04")
        terminal.expect("tokens in use")
        check(terminal.seen.count(b"abcd") == 0, "one message, one answer")
        equal(terminal.end(), 0, "exit")
    terminal = Terminal("chat", "-m", CHAIN)
    terminal.prompt()
    terminal.send("\x1b[200~" + "long " * 800 + "\x1b[201~!\r")
    terminal.expect("abcd\U0001f600efg")
    equal(message_ids(terminal, save).strip(b"\n"), b"long " * 800 + b"!", "4,000 characters pasted and one typed")
    terminal.send("\x04")
    equal(terminal.end(), 0, "exit")


def test_terminal_lines_and_eof():
    terminal = Terminal("chat", "-m", CHAIN)
    terminal.prompt()
    terminal.send("hi\r\x04")                       # faster than the pause that tells a paste from typing
    terminal.expect("abcd")
    equal(terminal.end(), 0, "Ctrl-D right behind a line")
    terminal = Terminal("chat", "-m", CHAIN)
    terminal.prompt()
    terminal.send("h\u00e9llo \u4f60\u597d <|user|>\x7f\r")
    terminal.expect("abcd\U0001f600efg")
    equal(message_ids(terminal, HOME + "/typed.json").strip(b"\n").decode(), "h\u00e9llo \u4f60\u597d <|user|", "UTF-8 typed, control tokens as text")
    terminal.send("\x04")
    equal(terminal.end(), 0, "exit")


def test_terminal_colour():
    for env, coloured in [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)]:
        terminal = Terminal("chat", "-m", CHAIN, "--think", "on", env=env)
        terminal.prompt()
        terminal.send("hi\r")
        before = terminal.expect("efg")
        terminal.send("\x04")
        equal(terminal.end(), 0, "exit")
        equal(b"\x1b[90m" in before, coloured, "reasoning is grey: %s" % env)
        if env.get("TERM") == "dumb":
            check(b"\x1b" not in before + terminal.seen, "a dumb terminal gets no escape sequences", before + terminal.seen)
    for env in ({}, {"TERM": "dumb"}):
        terminal = Terminal("generate", "-m", CHAIN, "-p", "d", env=env)
        equal((terminal.end(), terminal.seen), (0, "\U0001f600efg\r\n".encode()), "generate on a terminal prints the text alone")


def test_terminal_suspended():
    """Stopped at the prompt, and continued by a shell that left its own modes and another size."""
    terminal = Terminal("chat", "-m", CHAIN)
    terminal.prompt()
    terminal.send("h")
    terminal.settle()
    raw = termios.tcgetattr(terminal.slave)
    terminal.process.send_signal(signal.SIGSTOP)
    termios.tcsetattr(terminal.slave, termios.TCSANOW, terminal.before)
    fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 20, 0, 0))
    terminal.process.send_signal(signal.SIGCONT)
    limit = time.time() + PATIENCE
    while termios.tcgetattr(terminal.slave) != raw and time.time() < limit:
        terminal.pump(0.01)
    check(termios.tcgetattr(terminal.slave) == raw, "the editor's modes are back")
    terminal.send("i\r")
    terminal.expect("abcd\U0001f600efg")
    equal(message_ids(terminal, HOME + "/stopped.json").strip(b"\n"), b"hi", "and the line begun before")
    terminal.send("\x04")
    equal(terminal.end(), 0, "exit")


def test_terminal_interrupts():
    looping = os.path.join(HOME, "looping")         # a chain whose every answer is xyxyxy...
    if not os.path.isdir(looping):
        shutil.copytree(CHAIN, looping)
        data = bytearray(read(looping + "/model.safetensors"))
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(bytes(data[8:8 + length]))
        start = 8 + length + header["lm_head.weight"]["data_offsets"][0]
        for token in (TOKEN["</think>"], TOKEN["<think>"], TOKEN["<|assistant|>"]):
            for row in range(VOCAB):
                struct.pack_into("<f", data, start + 4 * (row * VOCAB + token), 1 if row == ord("x") else 0)
        write(looping + "/model.safetensors", bytes(data))
    terminal = Terminal("chat", "-m", looping)
    terminal.prompt()
    terminal.send("hi\r")
    terminal.expect("xyxyxy")
    terminal.send("\x03")
    terminal.expect("interrupted")
    terminal.prompt()
    terminal.send("hi\r")                           # the conversation goes on
    terminal.expect("xyxyxy")
    terminal.send("\x03")
    terminal.expect("interrupted")
    terminal.prompt()
    for _ in range(4):                              # any number at the prompt
        terminal.send("\x03")
        terminal.prompt()
    terminal.send("\x03\x03\x03")
    terminal.settle()
    terminal.send("/stats\r")
    terminal.expect("tokens in use")
    terminal.send("hi\r")
    terminal.expect("xyxyxy")
    terminal.process.send_signal(signal.SIGSTOP)    # both arrive before the program can answer the first
    terminal.process.send_signal(signal.SIGINT)
    terminal.process.send_signal(signal.SIGCONT)
    terminal.expect("interrupted")
    terminal.prompt()
    terminal.send("\x04")
    equal(terminal.end(), 0, "exit")
    # A pass that takes long: the second Ctrl-C does not wait for its end.
    for delay in (0.2, 0.1, 0.3, 0.05, 0.4, 0.15, 0.5, 0.25):
        terminal = Terminal("chat", "-m", RANDOM)
        terminal.prompt()
        terminal.send("q" * 3900 + "\r")
        terminal.expect("\r\n")
        time.sleep(delay)
        terminal.send("\x03")
        time.sleep(0.01)
        terminal.send("\x03")
        while terminal.process.poll() is None and b"> " not in terminal.seen:
            terminal.pump(0.01)
        if terminal.process.poll() is None:         # the pass ended between the two
            terminal.send("\x04")
            equal(terminal.end(), 0, "exit")
            continue
        equal(terminal.end(), 130, "two of them end the program")
        check(b"\x1b[?2004l" in terminal.seen, "and bracketed paste", terminal.seen[-100:])
        break
    else:
        check(False, "two of them end the program")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        terminal = Terminal("chat", "-m", CHAIN)
        terminal.prompt()
        terminal.send("hi")
        terminal.process.send_signal(number)
        equal(terminal.end(), -number, "a fatal signal ends the program, and gives the terminal back")
    process = subprocess.Popen([TIDE, "generate", "-m", looping, "-p", "x", "-n", "4000", "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    check(process.returncode == 1 and err == b"tide: interrupted\n" and out.endswith(b"\n"), "generate: text so far, and exit 1", process.returncode, err)


# ---- where the history lies

PLACES = [("--kv", "resident"), ("--kv", "hisparse"), ("--kv", "adaptive"), ("--kv", "hisparse", "--hot", "16"), ("--kv", "adaptive", "--hot", "19", "--lookup", "scan"),
          ("--kv", "adaptive", "--hot", "128", "--reclaim", "proportional"), ("--kv", "hisparse", "--lookup", "scan"), ("--kv", "adaptive", "--reclaim", "whole", "--lookup", "direct")]


def least_bytes(option, *args):
    """The least that a refusal asks for; one byte less is refused too."""
    result = refused(1, option, *args, option, "1K")
    found = re.search(rb"needs (\d+) bytes", result.err)
    check(found, "the refusal says what would do", result.err)
    least = int(found.group(1)) if found else 1
    refused(1, option + "|needs %d bytes" % least, *args, option, str(least - 1))
    return least


def test_placement_refusals():
    story = ("generate", "-m", RANDOM, "-p", "once upon a time", "-n", "40", "--temp", "1", "--seed", "4", "-c", "512")
    wanted = run(*story, "--kv", "resident").out
    for place in PLACES:
        least = least_bytes("--kv-budget", *story, *place)
        equal(run(*story, *place, "--kv-budget", str(least)).out, wanted, "the least device memory is enough: " + " ".join(place))
        if "resident" in place:
            continue
        host = least_bytes("--host-budget", *story, *place)
        equal(run(*story, *place, "--host-budget", str(host), "--kv-budget", str(least)).out, wanted, "and the least host memory: " + " ".join(place))
    bare = os.path.join(HOME, "bare")
    shutil.copytree(RANDOM, bare)
    write(bare + "/model.safetensors", struct.pack("<Q", 2) + b"{}")             # no tensor to bind
    refused(1, "--host-budget|" + bare, "generate", "-m", bare, "-p", "x", "--host-budget", "1K")      # before a weight is looked at
    refused(1, "--kv-budget|" + bare, "generate", "-m", bare, "-p", "x", "--kv", "hisparse", "--kv-budget", "1K")
    for command in (("generate", "-p", "x"), ("batch", write(HOME + "/p.txt", "x\n")), ("eval", "--ppl", "-p", "xy"), ("chat",), ("inspect",)):
        if command[0] == "eval":
            command = ("eval", "--ppl", "-f", write(HOME + "/xy", "xy"))
        result = run(*command, "-m", RANDOM, "--hot", "15")
        check(result.code == 1 and result.err.count(b"\n") == 1 and b"--hot 15" in result.err and b"16 rows" in result.err, command[0] + ": --hot below index_topk", result.code, result.err)
    equal(run(*story, "--hot", "16").out, wanted, "--hot as large as index_topk")
    refused(1, "65535 rows is more than", "generate", "-m", RANDOM, "-p", "x", "--hot", "65535")
    equal(run("generate", "-m", RANDOM, "-p", "x", "-n", "3", "-c", "8", "--hot", "8", "--temp", "0").code, 0, "a context below index_topk needs no more than itself")


def test_placement_does_not_show():
    prompt = write(HOME + "/long", "The quick brown fox jumps over the lazy dog. " * 9)
    story = ("generate", "-m", RANDOM, "-f", prompt, "-n", "150", "--temp", "1", "--seed", "4", "-c", "700")
    wanted = run(*story, "--kv", "resident").out
    check(len(wanted) > 20, "there is something to compare", wanted)
    rows = []
    for i in range(14):
        rows.append({"prompt": ("common ground " * 20 if i % 2 else "") + "abc" * (3 * i) + str(i % 5), "n": 5 + 7 * i, "seed": i, "temp": 0 if i % 3 == 0 else 1})
    prompts = write(HOME + "/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    batch = ("batch", "-m", RANDOM, prompts, "-c", "512")
    answers = run(*batch, "--kv", "resident", "--slots", "1").out
    equal(answers.count(b'"error":null'), len(rows), "all rows are answered")
    talk = "hello there\nand again, at some length: %s\n/regen\nbye\n" % ("x" * 200)
    talked = chat(talk, "--temp", "0", "-n", "90", "--kv", "resident", model=RANDOM).out
    for place in PLACES:
        name = " ".join(place)
        equal(run(*story, *place).out, wanted, "generate " + name)
        equal(chat(talk, "--temp", "0", "-n", "90", *place, model=RANDOM).out, talked, "chat " + name)
        for slots in ("1", "3", "32"):
            tight = re.search(rb"needs (\d+) bytes", run(*batch, *place, "--slots", slots, "--kv-budget", "1K").err).group(1)
            equal(run(*batch, *place, "--slots", slots).out, answers, "batch --slots %s %s" % (slots, name))
            equal(run(*batch, *place, "--slots", slots, "--kv-budget", str(int(tight) * 5 // 4)).out, answers, "batch --slots %s %s, hardly any memory" % (slots, name))
    ids = ",".join(str(3 + 7 * i % 300) for i in range(300))
    dumps = []
    for i, place in enumerate(PLACES):
        dump = HOME + "/dump%d" % i
        equal(run("eval", "-m", RANDOM, "--ids", ids, "--decode", "5,6,7", "--dump", dump, *place).code, 0, "eval --dump")
        dumps.append(read(dump))
    check(all(dump == dumps[0] for dump in dumps), "eval --dump writes the same bytes wherever rows lie")


def test_placement_of_dense_attention():
    for place in (("--kv", "adaptive"), ("--kv", "hisparse"), ("--hot", "1024"), ("--reclaim", "whole")):
        result = generate("-p", "1", "-n", "2", *place, quiet=False)
        check(b"qwen3" in result.err and place[0].encode() in result.err and b"resident: cache" in result.err and result.err.count(b"\n") == 2, "qwen3 runs resident, and says so", result.err)
        equal((result.code, result.out), (0, b"23\n"), "qwen3 with " + " ".join(place))
    equal(generate("-p", "1", "-n", "2").err, b"", "nothing to say where nothing was asked for")


def test_prefix_sharing():
    """Prompts of a batch that begin alike run what they share once."""
    common = "A beginning that all of these prompts have, of several pages of sixty-four tokens each. " * 3
    prompts = write(HOME + "/alike.txt", "".join(common + "and then, %d\n" % i for i in range(9)))
    def rows(*place):
        result = run("batch", "-m", RANDOM, prompts, "-c", "512", "--temp", "0", "-n", "6", "--stats", *place)
        shared = re.search(rb"(\d+) shared", result.err)
        return result.out, int(re.search(rb"rounds, (\d+) rows", result.err).group(1)), int(shared.group(1)) if shared else 0
    text, alone, none = rows("--kv", "resident")
    equal(none, 0, "a resident cache shares nothing")
    for slots in ("1", "3", "32"):
        for mode in ("hisparse", "adaptive"):
            out, run_rows, shared = rows("--kv", mode, "--slots", slots)
            equal(out, text, "the answers do not show it")
            equal(run_rows, alone - 64 * shared, "each shared page saves 64 rows")
            check(shared >= 8 * 4, "eight of nine prompts find four pages", mode, slots, shared)


def test_placement_plan():
    """What inspect and the first line on stderr say of the two memories."""
    for place, words in [(("--kv", "resident"), b"resident: cache "), (("--kv", "hisparse", "--hot", "100"), b"hisparse: cache .*100 hot rows and 4 pages required of a session.*on the host"),
                         (("--slots", "5"), b"5 x 4096 bf16 rows, adaptive: cache .*32 hot rows and 3 pages required of a session.*on the host"),
                         (("--kv-dtype", "fp8", "-c", "1000"), b"1 x 1000 fp8 rows, adaptive")]:
        result = run("inspect", "-m", RANDOM, *place)
        check(result.code == 0 and re.search(words, result.out), "inspect prints the plan: " + " ".join(place), result.out[-300:])
        check((b"on the host" in result.out) == (b"resident" not in words), "host memory where there is any", result.out[-300:])
    for budget in (3 << 20, 5 << 20):
        plan = run("inspect", "-m", RANDOM, "--slots", "16", "--kv-budget", str(budget)).out
        used = float(re.search(rb"cache ([0-9.]+) MB", plan).group(1)) * 1e6
        check(0.9 * budget < used <= budget + 1e5, "the pool fills its budget", used, budget)


# ---- memory

def address_space(bytes_):
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))


def test_memory_refusals():
    refused(1, "--kv-budget|lower -c", "generate", "-m", RANDOM, "-p", "x", "--kv-budget", "100K")
    refused(1, "--kv-budget", "batch", "-m", RANDOM, write(HOME + "/p.txt", "x\n"), "--slots", "64", "--kv-budget", "2M")
    unreadable = os.path.join(HOME, "unreadable")
    shutil.copytree(RANDOM, unreadable)
    write(unreadable + "/model.safetensors", struct.pack("<Q", 2) + b"{}")       # no tensor to bind
    refused(1, "--kv-budget", "generate", "-m", unreadable, "-p", "x", "--kv-budget", "100K")      # before a weight is looked at
    equal(generate("-p", "1", "-n", "2", "--kv-budget", "1G").out, b"23\n", "a budget that suffices")
    huge = os.path.join(HOME, "huge")
    shutil.copytree(RANDOM, huge)
    config = json.loads(read(huge + "/config.json"))
    write(huge + "/config.json", json.dumps(dict(config, max_position_embeddings=1 << 24)))
    refused(1, "free memory|-c", "generate", "-m", huge, "-p", "x", "-c", str(1 << 24), "--kv-dtype", "f32")
    refused(1, "", "batch", "-m", huge, HOME + "/p.txt", "-c", str(1 << 24), "--slots", "512")
    if SANITIZED:
        return                                      # the sanitizer maps terabytes of its own
    outcomes = []
    for megabytes in (16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024):
        if HAS_CUDA and subprocess.run([TIDE, "--help"], capture_output=True, preexec_fn=address_space(megabytes << 20)).returncode < 0:
            continue                                # CUDA's runtime needs more before main() begins
        result = run("generate", "-m", RANDOM, "-p", "x", "-n", "4", "--seed", "1", limits=address_space(megabytes << 20))
        outcomes.append(result.code)
        check(result.code in (0, 1, 127) and (result.code == 0) == (result.err == b"") and result.err.count(b"\n") <= 1, "one sentence under %d MB of address space" % megabytes, result.code, result.err)
    check(outcomes == sorted(outcomes, reverse=True) and outcomes[-1] == 0, "more memory is never worse", outcomes)


def peak_memory(args, text):
    """The largest anonymous memory of a run, in bytes, and the planned cache."""
    process = subprocess.Popen([TIDE, *args], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment({"OMP_NUM_THREADS": "2"}))
    peak = 0
    while process.poll() is None:
        try:
            status = open("/proc/%d/status" % process.pid).read()
        except OSError:
            break
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        if found:
            peak = max(peak, int(found.group(1)) << 10)
        time.sleep(0.005)
    err = process.stderr.read().decode()
    tiers = re.findall(r"cache ([0-9.]+) MB|([0-9.]+) MB on the host", err)
    check(process.wait() == 0 and tiers, "runs", text, err)
    return peak, sum(float(device or host) for device, host in tiers) * 1e6


def test_memory_used():
    if SANITIZED:
        return
    for model, mode in [(model, mode) for model in [RANDOM, MINI] for mode in ("resident", "hisparse", "adaptive") if os.path.exists(model + "/config.json")]:
        text = write(HOME + "/text", "The quick brown fox jumps over the lazy dog. " * (200 if model == MINI else 60))
        peak, cache = peak_memory(["eval", "-m", model, "-f", text, "--ppl", "-c", "4096" if model == MINI else "2048", "--kv", mode], model)
        check(0 < peak < cache + 64e6, "less than 64 MB beside weights and cache: %.1f MB (%s, %s)" % ((peak - cache) / 1e6, model, mode))


    rows = 50000
    path = write(HOME + "/rows.txt", "\n" * rows)
    process = subprocess.Popen([TIDE, "batch", "-m", CHAIN, path, "-o", HOME + "/rows.jsonl", "--quiet"], env=environment())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status >> 8
    equal((status >> 8, read(HOME + "/rows.jsonl").count(b"\n")), (3, rows), "a file of many rows")
    check(usage.ru_maxrss < 40000, "a waiting row takes little", usage.ru_maxrss)


DFLASH2, DSPARK = os.path.join(ROOT, "weights", "draft-dflash2"), os.path.join(ROOT, "weights", "draft-dspark")


def test_draft_refusals():
    """Every mistake about drafters is one line."""
    for value in ("0", "-1", "two", "4x", ""):
        refused(2, "--width", "generate", "-m", CHAIN, "-p", "x", "--width", value)
    refused(2, "--verify", "generate", "-m", CHAIN, "-p", "x", "--verify", "some")
    refused(2, "--accept", "generate", "-m", CHAIN, "-p", "x", "--accept", "all")
    refused(1, "config.json", "generate", "-m", MINI, "-p", "x", "--draft", "/nowhere")
    refused(1, "config.json", "generate", "-m", CHAIN, "-p", "x", "--draft", DFLASH2)
    refused(2, "--verify dvl|predictor", "generate", "-m", MINI, "-p", "x", "--draft", DSPARK, "--verify", "dvl")
    refused(2, "--verify confidence|confidence head", "generate", "-m", MINI, "-p", "x", "--draft", DFLASH2, "--verify", "confidence")
    result = run("generate", "-m", CHAIN, "-p", "1", "-n", "2", "--width", "4", quiet=False)
    check(result.code == 0 and result.out == b"23\n" and b"do not apply without a drafter" in result.err, "a width without a drafter", result.err)


def test_drafts():
    """The text with drafts is the text without, whoever drafts and however much is verified."""
    prompt = ("-m", MINI, "-p", "The king of the", "-n", "40")
    for sampling in (("--temp", "0"), ("--temp", "0.9", "--top-p", "0.95", "--seed", "7"), ("--temp", "1", "--top-k", "30", "--seed", "8")):
        wanted = run("generate", *prompt, *sampling, "--draft", "none").out
        for how in (("--draft", DFLASH2), ("--draft", DFLASH2, "--width", "max", "--verify", "full"), ("--draft", DSPARK, "--width", "3"),
                    ("--draft", DFLASH2, "--width", "4", "--verify", "dvl", "--allocate", "seeded"), ("--draft", DSPARK, "--width", "max")):
            equal(run("generate", *prompt, *sampling, *how).out, wanted, "text with " + " ".join(how + sampling))
    once = [run("generate", *prompt, "--temp", "0.8", "--seed", "3", "--draft", DSPARK, "--accept", "rejection", "--width", "5", "--verify", "full").out for _ in range(2)]
    check(once[0] == once[1] and once[0], "acceptance by rejection repeats itself where no length hangs on time", *once)


def test_draft_reports():
    trace = os.path.join(HOME, "drafts.jsonl")
    result = run("generate", "-m", MINI, "--draft", DFLASH2, "-p", "The king of the", "-n", "60", "--temp", "0", "--width", "max", "--trace", trace,
                 "--stats", quiet=False)
    rounds = [json.loads(line) for line in read(trace).splitlines()]
    blocks = [session for entry in rounds for session in entry["sessions"] if session["proposed"]]
    check(blocks and all(len(b["proposed"]) == 7 for b in blocks), "a block proposes seven tokens", blocks[:1])
    check(all(0 <= b["accepted"] <= b["verified"] <= 7 for b in blocks), "accepted drafts are among the verified ones")
    check(any(b["accepted"] for b in blocks), "some draft is accepted")
    check(all(b["frontier"] == b["anchor_pos"] + 1 + b["accepted"] for b in blocks), "the frontier moves by the anchor and the accepted drafts")
    equal(sum(s["accepted"] + 1 for entry in rounds for s in entry["sessions"]), 60, "tokens of all rounds")
    for words in (b"DFlash2DraftModel", b"a ring of 384 rows, 1.18 MB", b"drafts accepted", b"draft ", b"allocate ", b"verify ", b"accept "):
        check(words in result.err, "plan and statistics say", words, result.err)
    inspected = run("inspect", "-m", MINI, "--draft", DSPARK)
    for words in (b"drafter Qwen3DSparkModel", b"markov_head.markov_w1.weight", b"target_layer_ids 2 4 6", b"a ring of 384 rows"):
        check(inspected.code == 0 and words in inspected.out, "inspect prints", words, inspected.err)


def test_draft_batch():
    prompts = "\n".join(json.dumps({"prompt": text, "n": 24 + i}) for i, text in enumerate(["The king", "Add 4 and 5.", "apt-get", "She was", "A", "Once"] * 3))
    path = write(os.path.join(HOME, "draft-prompts.jsonl"), prompts)
    wanted = run("batch", "-m", MINI, path, "--slots", "6", "--temp", "0.7", "--seed", "4", "--draft", "none")
    for how in (("--draft", DFLASH2), ("--draft", DSPARK, "--verify", "full", "--width", "5"), ("--draft", DFLASH2, "--kv", "hisparse", "--width", "4")):
        found = run("batch", "-m", MINI, path, "--slots", "6", "--temp", "0.7", "--seed", "4", *how)
        equal(found.out, wanted.out, "batch with " + " ".join(how))
    check(wanted.code == 0, "batch runs", wanted.err)


def test_mini():
    """A few things on the shipped model, where it is there."""
    if not os.path.exists(MINI + "/config.json") or SANITIZED:
        return
    result = run("generate", "-p", "Hello", "-n", "8", "--temp", "0")
    check(result.code == 0 and len(result.out) > 4 and result.out.decode("utf-8"), "weights/mini is the default", result.err)
    equal(run("generate", "-p", "Hello", "-n", "8", "--temp", "0").out, result.out, "greedy repeats")
    talk = run("chat", "--temp", "0", "--stats", stdin=b"Hello!\nWhat is 12 + 30?\n")
    check(talk.code == 0 and talk.out.count(b"\n") >= 2 and b"re-used" in talk.err, "it talks", talk.out, talk.err)
    for thinks in ((), ("--think", "on")):
        found = run("generate", "-m", MINI + "-v41", "--chat", *thinks, "--quiet", "-p", "What is 47 + 38?", "-n", "60", "--temp", "0")
        check(found.code == 0 and b"47 + 38 = 85." in found.out, "mini-v41 adds" + " ".join(thinks), found.out, found.err)


def test_bench_files():
    """A measurement leaves a CSV, and an SVG where there is a gnuplot; without one it says so and keeps the rest."""
    out = os.path.join(HOME, "measured")
    os.mkdir(out)
    result = run("bench", "memory", "-o", out)
    equal((result.code, result.out.count(b"claim:"), b"falls short" in result.out), (0, 2, False), "the paper's table 1")
    check(os.path.getsize(out + "/memory.csv") > 100, "memory.csv")
    check(os.path.exists(out + "/memory.svg") == (shutil.which("gnuplot") is not None), "memory.svg where there is a gnuplot")
    os.remove(out + "/memory.csv")
    result = run("bench", "memory", "-o", out, env={"PATH": HOME})
    equal((result.code, result.err.count(b"\n"), b"gnuplot" in result.err), (0, 1, True), "no gnuplot: one line")
    check(os.path.exists(out + "/memory.csv"), "and the figures all the same")
    refused(1, "/nonexistent", "bench", "memory", "-o", "/nonexistent")


def test_dummy():
    """Random weights of any config.json: the published shapes' sizes, one text again and again, and refusals by name."""
    shape = os.path.join(HOME, "shape")
    os.mkdir(shape)
    shutil.copy(os.path.join(FIXTURE, "config.json"), shape)
    ids = run("generate", "-m", shape, "--dummy", "--ids", "1,2,3", "-n", "6", "--temp", "0").out
    equal(len(ids.split(b",")), 6, "it babbles")
    equal(run("generate", "-m", shape, "--dummy", "--ids", "1,2,3", "-n", "6", "--temp", "0", "--kv", "resident").out, ids, "always the same")
    check(run("generate", "-m", shape, "--dummy", "--layers", "1", "--ids", "1,2,3", "-n", "6", "--temp", "0").out not in (b"", ids), "one layer is another model")
    layers = json.loads(read(shape + "/config.json"))["num_hidden_layers"]
    refused(1, "found %d layers, wanted the first 99" % layers, "generate", "-m", shape, "--dummy", "--layers", "99", "--ids", "1")
    for command in (["generate", "-p", "x"], ["chat"]):
        refused(1, "no tokenizer.json there|--dummy", *command, "-m", shape, "--dummy")
    refused(1, "safetensors", "generate", "-m", shape, "--ids", "1")
    notice = run("generate", "-m", shape, "--dummy", "--ids", "1", "-n", "1", "--no-graph").err
    check(b"does not apply to the CPU" in notice, "--no-graph on the CPU", notice)
    known = lambda *args: re.search(rb".* M parameters in use, .* MB", run("inspect", *args).out)
    if os.path.exists(MINI + "/config.json"):
        equal(known("-m", MINI, "--dummy")[0], known("-m", MINI, "--draft", "none")[0], "as many bytes as the checkpoint itself")
    for name, size in (("glm-5.3", 1486754.1), ("glm-5.3-fp8", 745584.5), ("deepseek-v3.2", 674030.3), ("deepseek-v4-flash", 156015.7), ("qwen3-8b", 16381.5), ("qwen3-4b", 8044.9)):
        found = known("-m", os.path.join(ROOT, "weights", "shapes", name), "--dummy")
        check(found and (b"%.1f MB" % size) in found[0], "the published size of " + name, found and found[0])
    refused(1, "the weights of 78 layers need 1486754 MB|lower --layers", "generate", "-m", os.path.join(ROOT, "weights", "shapes", "glm-5.3"), "--dummy", "--ids", "1")


def stored(data, name, form):
    """The values of one tensor of a safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    begin, end = json.loads(data[8:8 + size])[name]["data_offsets"]
    return struct.unpack("<%d%s" % ((end - begin) // 4, form), data[8 + size + begin:8 + size + end])


def test_v4():
    """DeepSeek-V4 through the program: the dump's tensors, the same text in any mode, random weights, refusals by name."""
    model = os.path.join(ROOT, "tests", "fixtures", "deepseek_v4-c")
    dump = HOME + "/v4.safetensors"
    golden = read(os.path.join(model, "golden.safetensors"))
    prompt = stored(golden, "input_ids", "i")
    result = run("eval", "-m", model, "--ids", ",".join(str(i) for i in prompt), "--decode", "7", "--kv-dtype", "f32", "--dump", dump)
    equal((result.code, result.out, result.err), (0, b"", b""), "--dump")
    data = read(dump)
    header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
    for name in ("logits", "hidden.6"):
        worst = max(abs(a - b) for a, b in zip(stored(data, name, "f"), stored(golden, name, "f"), strict=True))
        check(worst < 3e-3, "the dump's %s are the golden ones" % name, worst)
    shapes = {name: entry["shape"] for name, entry in header.items()}
    equal(len(data), 8 + struct.unpack("<Q", data[:8])[0] + max(entry["data_offsets"][1] for entry in header.values()), "the dump's size")
    equal((shapes["hidden.6"], shapes["topk.2"], "topk.1" in shapes), ([150, 4, 32], [150, 8], False), "streams, and rows selected in sparse layers")
    args = ("generate", "-m", model, "--ids", ",".join(str(3 * i % 192) for i in range(1, 300)), "-n", "20", "--temp", "0")
    ids = run(*args).out
    equal(len(ids.split(b",")), 20, "it babbles")
    for mode in ("resident", "hisparse", "adaptive"):
        equal(run(*args, "--kv", mode, "--kv-budget", "3M", "-c", "512").out, ids, "--kv " + mode)
    rounded = run(*args, "--qat", "--kv-dtype", "fp4")
    equal((rounded.code, len(rounded.out.split(b","))), (0, 20), "--qat")
    shape = os.path.join(HOME, "shape-v4")
    os.mkdir(shape)
    shutil.copy(os.path.join(model, "config.json"), shape)
    equal(run("generate", "-m", shape, "--dummy", "--ids", "1,2,3", "-n", "6", "--temp", "0").out.count(b","), 5, "--dummy")
    refused(1, "--qat does not apply to glm_moe_dsa", "generate", "-m", FIXTURE, "--ids", "1", "--qat")
    refused(1, "--kv-dtype fp4 does not apply to glm_moe_dsa", "generate", "-m", FIXTURE, "--ids", "1", "--kv-dtype", "fp4")
    refused(1, "no drafter drafts for deepseek_v4", "generate", "-m", model, "--draft", "weights/draft-dflash2", "--ids", "1")


def test_v4_effort():
    """DeepSeek-V4's two encoders: paragraphs in front of what is to think. V3.2's, which has the same tokens, has none."""
    model = os.path.join(HOME, "effort-v4")
    shutil.copytree(os.path.join(ROOT, "tests", "fixtures", "tokenizer-deepseek-v32"), model)
    row = write(HOME + "/effort-v4.jsonl", json.dumps({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], "add_generation_prompt": True}) + "\n")
    bos, end = "<｜begin▁of▁sentence｜>", "Be brief.<｜User｜>hi<｜Assistant｜>"
    high = (bos + "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very", "no assumption is left unchecked.\n\n" + end + "<think>")
    most = (bos + "Reasoning Effort: Beyond maximum \u2014 exhaustive, relentless, and uncompromising.\nYou MUST", "no error remains undiscovered.\n\n" + end + "<think>")
    refused(1, "has no efforts", "tokenize", "-m", model, "--jsonl", row, "--effort", "high")
    for release, levels in (({}, {"high": (bos + end + "<think>",) * 2, "max": high}),
                            ({"dspark_block_size": 5}, {"low": (bos + end + "<think>",) * 2, "high": high, "max": most})):
        write(model + "/config.json", json.dumps({"model_type": "deepseek_v4"} | release))
        for level, (begins, ends) in levels.items():
            result = run("tokenize", "-m", model, "--jsonl", row, "--effort", level)
            prompt = json.loads(result.out)["prompt"]
            check(prompt.startswith(begins) and prompt.endswith(ends), "effort %s of %s" % (level, release), prompt)
        equal(json.loads(run("tokenize", "-m", model, "--jsonl", row).out)["prompt"], bos + end + "<think>", "none asked for")
    write(model + "/config.json", json.dumps({"model_type": "deepseek_v4"}))
    refused(1, "only high and max", "tokenize", "-m", model, "--jsonl", row, "--effort", "low")


def test_plan():
    """What history costs, of real shapes by their config.json alone: table 3's arithmetic, and what the models are published to need."""
    for shape, words in (("deepseek-v4.1-flash", (b"--kv-dtype fp4: 890 bytes of history a token: 720 of rows, 170 of index keys;",
                                                  b"720 bytes of them in host memory, in rows of 288 from 4 sources; a step resolves 8 selections of 512 rows and copies for 0 followers;")),
                         ("deepseek-v4-flash", (b"--kv-dtype fp4: 3509 bytes of history a token: 3152 of rows, 357 of index keys;",
                                                b"3061 bytes of them in host memory, in rows of 583 from 21 sources; a step resolves 21 selections of 512 rows and copies for 0 followers;")),
                         ("glm-5.3", (b"--kv-dtype bf16: 95232 bytes of history a token: 89856 of rows, 5376 of index keys\n",
                                      b"in rows of 1152 from 78 sources; a step resolves 21 selections of 2048 rows and copies for 57 followers;"))):
        result = run("inspect", "--plan", "-m", os.path.join(ROOT, "weights", "shapes", shape))
        check(result.code == 0 and not result.err and all(line in result.out for line in words), "the plan of " + shape, result.out, result.err)
    refused(1, "config.json", "inspect", "--plan", "-m", HOME)


def test_draft_own():
    """The stages inside a checkpoint draft by themselves, change no token, and are seen."""
    model = os.path.join(ROOT, "tests", "fixtures", "deepseek_v41-a")
    golden = read(os.path.join(model, "golden.safetensors"))
    prompt = ",".join(str(i) for i in stored(golden, "input_ids", "i"))
    for sampling in (("--temp", "0"), ("--temp", "0.8", "--seed", "3")):
        for dtype in ("bf16", "f32", "fp4"):
            args = ("generate", "-m", model, "--ids", prompt, "-n", "33", "--kv-dtype", dtype, *sampling)
            wanted = run(*args, "--draft", "none").out
            for how in ((), ("--draft", "own", "--width", "max", "--verify", "full", "--kv", "resident"), ("--kv", "hisparse", "--width", "4"),
                        ("--width", "max", "--verify", "confidence", "--kv-budget", "3M", "-c", "512")):
                equal(run(*args, *how).out, wanted, "own drafts change nothing: " + " ".join(how))
    accepted = stored(golden, "dspark.accepted", "i")[:-1]
    n = len(accepted) + sum(accepted) + 2                                    # one token is left for the last round, which drafts none
    result = run("generate", "-m", model, "--ids", prompt, "-n", str(n), "--temp", "0", "--width", "max", "--verify", "full", "--stats", "--kv-dtype", "f32")
    words = ("%d rounds with drafts, 1 without" % len(accepted), "%.2f of " % (sum(accepted) / len(accepted)))
    check(all(word.encode() in result.err for word in words), "as many rounds as the golden ones", result.err)
    equal(result.out.decode().strip(), ",".join(str(i) for i in stored(golden, "dspark.greedy", "i")[:n]), "the golden stream")
    once = [run("generate", "-m", model, "--ids", prompt, "-n", "20", "--temp", "0.8", "--seed", "3", "--accept", "rejection", "--width", "5").out for _ in range(2)]
    equal(once[0], once[1], "rejection, twice the same")
    inspected = run("inspect", "-m", model)
    for words in (b"drafter DSpark", b"num_experts_per_tok 2\nblock_size 5", b"target_layer_ids 6 7 8", b"M parameters of the drafter",
                  b"DSpark, 0.1 MB of weights, 5 drafts a block", b"a ring of 128 rows"):
        check(inspected.code == 0 and words in inspected.out, "inspect prints", words, inspected.err)
    check(b"drafter" not in run("inspect", "-m", model, "--draft", "none").out, "--draft none")
    refused(1, "found no draft stages", "generate", "-m", MINI, "-p", "x", "--draft", "own")
    refused(1, "no drafter drafts for deepseek_v41 from another folder", "generate", "-m", model, "--ids", "1", "--draft", DSPARK)
    refused(2, "--verify dvl|predictor", "generate", "-m", model, "--ids", "1", "--verify", "dvl")
    for name in ("acceptance", "lengths", "confidence", "draft"):
        refused(1, "wants a drafter", "bench", name, "-m", MINI, "--draft", "none", "-o", HOME)
    refused(1, "heldout.jsonl", "bench", "acceptance", "-m", model, "-o", HOME)
    for name, words in (("deepseek-v4.1-flash", (b"DSpark, 7932.9 MB of weights, 5 drafts a block", b"a ring of 256 rows, 0.79 MB", b"14225.4 M parameters of the drafter")),
                        ("deepseek-v4-flash", (b"MTP, 3593.8 MB of weights, 1 drafts a block",))):
        result = run("inspect", "-m", os.path.join(ROOT, "weights", "shapes", name), "--dummy", "--draft", "own")
        for word in words: check(word in result.out, name, word, result.out[-600:])


def test_bench_decode():
    """Whole steps and their operations, for each family; what cannot be measured is refused."""
    out = os.path.join(HOME, "decoded")
    os.mkdir(out)
    for family in ("qwen3-a", "glm_moe_dsa-a", "deepseek_v32-c", "deepseek_v4-c", "deepseek_v41-c"):
        rows = 256 if family == "deepseek_v4-c" else 320            # whole pages
        shape = os.path.join(HOME, "shape-" + family)
        os.mkdir(shape)
        config = json.loads(read(os.path.join(ROOT, "tests", "fixtures", family, "config.json"))) | {"max_position_embeddings": 1024}
        write(shape + "/config.json", json.dumps(config))
        result = run("bench", "decode", "-m", shape, "--dummy", "-c", "576", "--slots", "8", "--device", "cpu", "-o", out)
        check(result.code == 0 and b" 8 x %d rows" % rows in result.out and b"\n32 x" not in result.out, "batches of 1 and 8", result.out, result.err)
        norms = b"\nmix_streams " if "v4" in family else b"\nrms_norm "
        check(norms in result.out and b"\nlinear " in result.out, "where the time goes", result.out)
        equal(read(out + "/decode.csv").count(b"\n"), 3, "decode.csv")
    result = run("bench", "decode", "-m", shape, "--dummy", "-c", "300", "--slots", "1", "--device", "cpu", "-o", out)
    check(result.code == 1 and b"a context of 300 is too short" in result.err and not result.out, "no room for a history", result.err)
    result = run("bench", "first", "-m", shape, "--dummy", "--device", "cpu")
    check(result.code == 0 and b"ms from a message to the first token" in result.out, "bench first", result.out, result.err)


tests = [(name, function) for name, function in list(globals().items()) if name.startswith("test_") and (len(sys.argv) < 2 or any(word in name for word in sys.argv[1:]))]
HOME = tempfile.mkdtemp(prefix="tide-cli-")
CHAIN, RANDOM = os.path.join(HOME, "chain"), os.path.join(HOME, "random")
try:
    make_chain_model(CHAIN)
    make_random_model(RANDOM)
    for current, function in tests:
        begun = time.time()
        try:
            function()
        except Exception as problem:
            import traceback
            check(False, "the test itself broke: %s" % problem, traceback.format_exc()[-600:])
        if time.time() - begun > 10:
            print("(%s took %.0f s)" % (current, time.time() - begun))
finally:
    shutil.rmtree(HOME, ignore_errors=True)
print("%d passed, %d failed" % (passed, failed))
sys.exit(failed > 0)
