#!/usr/bin/env python3
"""engram_map.py: what DeepSeek-V4.1's Engram takes each token for, from the checkpoint's tokenizer.

    weights/engram_map.py DIR           writes DIR/engram.safetensors, which tide reads beside the published files

Engram looks vectors up by the last few tokens, and tokens that differ only in case, accents, width or white space count as one. The
release computes that map when it starts and does not publish it; the rule is:

  1. each token is decoded by itself; one whose bytes are no text of their own (U+FFFD shows) is known by its raw spelling;
  2. NFKC, NFD, accents away (all marks), lower case, every run of white space one space;
  3. stripped of white space at both ends, unless it is one space; where nothing is left, it is known by its own text;
  4. the tokens that come out the same are one, numbered by first appearance.

The tensor engram.token_map is int32 [vocab_size]. config.json says how many different ones there are
(engram_compressed_vocab_size), and the script fails where it finds another number. Needs the tokenizers library."""
import json
import os
import struct
import sys

from tokenizers import Regex, Tokenizer, normalizers

KEPT = "\ue000"                 # stands for a lone space while the others are stripped
NORMAL = normalizers.Sequence([
    normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
    normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), KEPT), normalizers.Strip(),
    normalizers.Replace(KEPT, " ")])


def known_by(tokenizer, token):
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token)
    return NORMAL.normalize_str(text) or text


def token_map(tokenizer, vocab_size):
    known = {}
    return [known.setdefault(known_by(tokenizer, token), len(known)) for token in range(vocab_size)], len(known)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = sys.argv[1]
    with open(os.path.join(directory, "config.json")) as file:
        config = json.load(file)
    config = config.get("text_config", config)
    ids, found = token_map(Tokenizer.from_file(os.path.join(directory, "tokenizer.json")), config["vocab_size"])
    if found != config["engram_compressed_vocab_size"]:
        sys.exit("%s: the tokens come to %d different ones, config.json says %d" % (directory, found, config["engram_compressed_vocab_size"]))
    data = struct.pack("<%di" % len(ids), *ids)
    header = json.dumps({"engram.token_map": {"dtype": "I32", "shape": [len(ids)], "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    with open(os.path.join(directory, "engram.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data)


if __name__ == "__main__":
    main()
