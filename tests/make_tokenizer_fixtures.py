"""Makes tests/fixtures/tokenizer-*: tiny vocabularies in the shapes of published tokenizers, and what the reference says of them.

    python tests/make_tokenizer_fixtures.py [SHARED]        needs tokenizers (0.23) and jinja2

The vocabularies are trained here on this repository's own text; ids come from Hugging Face's `tokenizers`. Chat prompts come
from the checkpoints' own templates where SHARED/fixtures/tokenizers has them (Qwen3, DeepSeek-V3), otherwise from a
transcription of what is published about them (GLM-5, 5.2, 5.3; the encoders of DeepSeek-V3.2 and V4.1). Seeds are fixed.
"""
import json, pathlib, random, sys
import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

here = pathlib.Path(__file__).parent
shared = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else here.parent.parent / "shared") / "fixtures" / "tokenizers"
random.seed(20261129)

corpus = [line for name in ("LICENSE", "engine.h", "tests/check.h") for line in open(here.parent / name)]
corpus += ["Größe naïve café\n", "東京は日本の首都です。中文字符\n", "Привет, мир! नमस्ते 한국어\n", "  if (x == 10) { return 'don\\'t'; }\n"] * 8

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"]


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(pattern if behavior == "string" else Regex(pattern), behavior, invert)


def byte_level(prefix=False, regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def train(pre_tokenizer, size, added=(), normalizer=None, post=None, **model):
    """A trained tokenizer as the text of its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer: tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if post: tokenizer.post_processor = post(tokenizer)
    value = json.loads(tokenizer.to_str())
    value["model"].update(model)
    if model.pop("merges_as_strings", False):
        value["model"]["merges"] = [" ".join(pair) for pair in value["model"]["merges"]]
        del value["model"]["merges_as_strings"]
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


TEXTS = ["", " ", "  ", "a", "\n", "\r\n\r\n", "Hello, world!", " leading", "trailing ", "don't WE'LL 'ſ K's", "1234567890 22 333", "x\x00y\x1b[0m",
         "Größe naïve café", "Gro\u0308ße nai\u0308ve cafe\u0301", "a\u0301\u0323b\u0323\u0301 \u1100\u1161\u11a8 \u212b \ufb01", "東京は日本の首都です。カタカナ",
         "Привет мир", "नमस्ते दुनिया", "한국어 텍스트", "👩\u200d👩\u200d👧 🏳️\u200d🌈 👍🏽", "a\u0085b\u180ec\ufeffd\u00a0e\u3000f\u2028g\u200bh",
         "\t\tif (x) {\n\t\t    return 10;\n\n\n}", "    spaces      and\n \n  lines  \n", "HTTPServer camelCase ǅabc ABCdef", "①②Ⅳ½²", "ſt ﬆ ß ẞ",
         "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "software", "the Software", "THE SOFTWARE", "-----====>>>>  !!", "/path/to//file.c:12\n\n", "\u202dbidi\u202c"]
PARTS = list("aeh .,'\n\r\t0123<>|é中カ한ँ") + [" the", "ſ", "\u180e", "\u0085", "e\u0301", "👍🏽", "\u200d", "Ⓐ", "int", "  ", "'LL", "software"]


def texts(added):
    parts = PARTS + [token.content for token in added] * 2 + [token.content + " " for token in added] + [" " + token.content for token in added]
    return TEXTS + [token.content for token in added] + ["".join(random.choices(parts, k=random.randint(2, 14))) for _ in range(20)]


def write(name, tokenizer_json, config=None, chat=(), templates=()):
    """chat rows may name one of `templates`, by its number, as the chat_template they are rendered by."""
    folder = here / "fixtures" / ("tokenizer-" + name)
    folder.mkdir(parents=True, exist_ok=True)
    reference = Tokenizer.from_str(tokenizer_json)
    (folder / "tokenizer.json").write_text(tokenizer_json)
    if config: (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
    if templates: (folder / "templates.json").write_text(compact(templates))
    with open(folder / "cases.jsonl", "w") as out:
        for text in texts([AddedToken(entry["content"]) for entry in json.loads(tokenizer_json)["added_tokens"]]):
            ids = reference.encode(text, add_special_tokens=False).ids
            out.write(compact({"text": text, "ids": ids, "decoded": reference.decode(ids, skip_special_tokens=False)}))
    if chat:
        with open(folder / "chat_cases.jsonl", "w") as out:
            for row in chat:
                # content that spells no added token: the ids are the reference's for the whole prompt
                row["ids"] = reference.encode(row["prompt"], add_special_tokens=False).ids
                out.write(compact(row))


# ---- chat templates

GLM5 = """[gMASK]<sop>{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}
{%- endif -%}{%- endfor -%}{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|assistant|>{%- set content = m.content -%}{%- set reasoning = none -%}
{%- if '</think>' in content -%}{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
{%- if loop.index0 > ns.last and reasoning is not none -%}{{ '<think>' + reasoning + '</think>' }}{%- else -%}{{ '</think>' }}{%- endif -%}
{{ content.strip() }}{%- else -%}<|{{ m.role }}|>{{ m.content }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{ '<think>' if enable_thinking else '</think>' }}{%- endif -%}"""
GLM52 = GLM5.replace("{{ '</think>' }}", "{{ '<think></think>' }}").replace("else '</think>' }}", "else '<think></think>' }}").replace(
    "<sop>", "<sop>{%- if enable_thinking -%}<|system|>Reasoning Effort: Max{%- endif -%}", 1)
GLM53 = GLM5.replace("{{ '</think>' }}", "{{ '<think></think>' }}").replace("loop.index0 > ns.last and ", "").replace(
    "{{ '<think>' if enable_thinking else '</think>' }}", "<think>").replace("<sop>", "<sop><|system|>Reasoning Effort: Max", 1)


def jinja(template):
    compiled = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    return lambda messages, generate, think: compiled.render(
        messages=messages, add_generation_prompt=generate, enable_thinking=think, bos_token="<｜begin▁of▁sentence｜>")


def deepseek_v32(messages, generate, think):
    """The published encoder for text messages, except that no answer is opened at the end unless asked for."""
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    prompt = "<｜begin▁of▁sentence｜>"
    for i, m in enumerate(messages):
        if m["role"] == "system":
            prompt += m["content"]
        elif m["role"] == "user":
            prompt += "<｜User｜>" + m["content"]
            if generate or i < len(messages) - 1:
                prompt += "<｜Assistant｜>" + ("<think>" if think and i == last_user else "</think>")
        else:
            reasoning, closed, content = m["content"].partition("</think>")
            if not closed: reasoning, content = "", m["content"]
            if think and i > last_user: prompt += reasoning.split("<think>")[-1] + "</think>"
            prompt += content + "<｜end▁of▁sentence｜>"
    return prompt


def deepseek_v41(messages, generate, think):
    """The same for V4.1: system text behind a token of its own, the effort in front, user messages that follow each other made one."""
    prompt, merged = "<｜begin▁of▁sentence｜>", []
    for m in messages:
        if m["role"] == "user" and merged and merged[-1]["role"] == "user":
            merged[-1] = {"role": "user", "content": merged[-1]["content"] + "\n\n" + m["content"]}
        else:
            merged.append(m)
    asks = [m["role"] == "user" or (m["role"] == "system" and i > 0) for i, m in enumerate(merged)]
    last = max((i for i, ask in enumerate(asks) if ask), default=-1)
    effort = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n" if think else ""
    if merged and (effort or merged[0]["role"] == "system"):
        prompt += "<｜System｜>" + effort
    for i, m in enumerate(merged):
        if m["role"] == "assistant":
            reasoning, closed, content = m["content"].partition("</think>")
            if not closed: reasoning, content = "", m["content"]
            if think and i > last: prompt += reasoning.split("<think>")[-1] + "</think>"
            prompt += content + "<｜end▁of▁sentence｜>"
            continue
        prompt += ("<｜User｜>" if m["role"] == "user" else "<｜System｜>" if i else "") + m["content"]
        ends = i == len(merged) - 1
        if asks[i] and (generate if ends else merged[i + 1]["role"] == "assistant"):
            prompt += "<｜Assistant｜>" + ("<think>" if think and i >= last else "</think>")
    return prompt


def conversations(alternating=False):
    """Messages with and without reasoning; alternating: system first, then user and assistant in turns."""
    words = ["Hi", "2+2?", " spaced \n", "\n\nlines\n", "", "naïve 中文", "ok.", "It's\tfine", "a\n\nb"]
    reasoning = ["", "<think>\nHm.\n</think>\n\n", "<think></think>", "<think>\n\n</think>\n\n", "Hm.</think>", "<think>\n a\n\nb \n</think>"]
    for n in range(15):
        system = [{"role": "system", "content": random.choice(words)}] if n % 3 == 0 else []
        turns = []
        for i in range(random.randint(1, 6)):
            role = ("user", "assistant")[i % 2] if alternating else random.choice(["user", "user", "assistant", "system"])
            content = random.choice(words)
            if role == "assistant": content = random.choice(reasoning) + content
            if role == "user" and n % 5 == 4: content = "<tool_response>" + content + "</tool_response>"
            turns.append({"role": role, "content": content})
        yield system + turns


def chat_cases(render, template=None, alternating=False):
    for messages in conversations(alternating):
        generate, think = random.random() < 0.7, random.random() < 0.5
        if alternating and messages[-1]["role"] == "assistant": generate = False
        row = {"messages": messages, "add_generation_prompt": generate, "enable_thinking": think, "prompt": render(messages, generate, think)}
        yield row if template is None else {"template": template, **row}


def special(*contents): return [AddedToken(content, special=True, normalized=False) for content in contents]
def plain(*contents, **flags): return [AddedToken(content, special=False, **{"normalized": False, **flags}) for content in contents]


# ---- the fixtures

write("llama3", train(pre_tokenizers.Sequence([split(LLAMA3), byte_level()]), 340,
                      special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
                      post=lambda t: processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
                          single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B:1",
                          special_tokens=[("<|begin_of_text|>", t.token_to_id("<|begin_of_text|>"))])]),
                      ignore_merges=True, merges_as_strings=True))

write("o200k", train(pre_tokenizers.Sequence([split(O200K), byte_level()]), 340,
                     special("<|startoftext|>", "<|endoftext|>", "<|start|>", "<|message|>", "<|end|>"), ignore_merges=True))

# every flag of an added token at once: normalization, stripping, whole words, nesting, overlap
write("added", train(pre_tokenizers.Sequence([split(QWEN), byte_level()]), 330,
                     special("<|im_start|>", "<|im_end|>") + plain("<|x|>", lstrip=True) + plain("xx", rstrip=True)
                     + plain("foo", single_word=True, normalized=True) + plain("nai\u0308ve", normalized=True)
                     + plain("e\u0301") + plain("  ") + plain("<|x|>s", "bar", lstrip=True, rstrip=True) + plain("<", "<<<"),
                     normalizer=normalizers.NFC()))

qwen = (shared / "qwen3" / "tokenizer_config.json")
write("chatml", train(pre_tokenizers.Sequence([split(QWEN), byte_level()]), 330,
                      special("<|endoftext|>", "<|im_start|>", "<|im_end|>") + plain("<think>", "</think>"), normalizer=normalizers.NFC()),
      chat=chat_cases(jinja(json.loads(qwen.read_text())["chat_template"])))

write("glm", train(pre_tokenizers.Sequence([split(LLAMA3), byte_level()]), 330,
                   special("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
                           "<|observation|>") + plain("<think>", "</think>")),
      chat=[case for number, template in enumerate((GLM5, GLM52, GLM53)) for case in chat_cases(jinja(template), number)],
      templates=[GLM5, GLM52, GLM53])

controls = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
names = {"bos_token": {"__type": "AddedToken", "content": controls[0]}, "eos_token": {"content": controls[1]}, "add_bos_token": True}
pre = pre_tokenizers.Sequence([split(pattern) for pattern in DEEPSEEK] + [byte_level()])
v3 = json.loads((shared / "deepseek_v3" / "tokenizer_config.json").read_text())["chat_template"]
write("deepseek-v3", train(pre, 330, special(*controls) + plain("<｜User｜>", "<｜Assistant｜>", normalized=True), merges_as_strings=True),
      config=names, chat=chat_cases(jinja(v3)))
write("deepseek-v32", train(pre, 330, special(*controls) + plain("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")),
      config=names, chat=list(chat_cases(deepseek_v32, alternating=True)) + list(chat_cases(deepseek_v32)))

# the pre-tokenizer's other forms, each put into the same file
base = train(byte_level(True, True), 320, special("<|endoftext|>"))
write("gpt2", base)
variants = [byte_level(False, True), byte_level(True, False), pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level(True, True)]),
            pre_tokenizers.Sequence([pre_tokenizers.Digits(False), byte_level()]), byte_level()]
for behavior in ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"):
    variants.append(pre_tokenizers.Sequence([pre_tokenizers.Split(" ", behavior), pre_tokenizers.Split("a.", behavior), byte_level()]))
    for invert in (False, True):
        for pattern in (r"\s", r"a*", r"(?=e)|t|\d{2}", r"\S\n|^\p{Lu}"):
            variants.append(pre_tokenizers.Sequence([split(pattern, behavior, invert), byte_level()]))
with open(here / "fixtures" / "tokenizer-gpt2" / "variants.jsonl", "w") as out:
    for variant in variants:
        reference = Tokenizer.from_str(base)
        reference.pre_tokenizer = variant
        cases = [{"text": text, "ids": reference.encode(text, add_special_tokens=False).ids}
                 for text in ["aa bat\ntea  ea.a 12345 Éa\u180e\u0085a\nTo", "".join(random.choices(PARTS + ["a", "t", "a."], k=10)), "a"]]
        out.write(compact({"pre_tokenizer": json.loads(reference.to_str())["pre_tokenizer"], "cases": cases}))

random.seed(41)
write("deepseek-v41", train(pre, 330, special(*controls) + plain("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")),
      config=names, chat=list(chat_cases(deepseek_v41, alternating=True)) + list(chat_cases(deepseek_v41)))
