#!/usr/bin/env python3
"""Prints the lengths of the sentences of a text, or of its documents, one a line, as --lengths of stage b takes them.

The text comes from standard input; a blank line ends a document. A sentence ends at a word's ".", "?" or "!" and at the end of its
document. What is counted are tokens: words (letters and digits, with apostrophes and hyphens within) and punctuation marks, each
one. Lengths are in the order of the text. Only the lengths are kept, not the text.

    bible -f -l10000 'gen1:1-gen30:43' | awk '{ split($1, at, ":"); if (NR > 1 && at[1] != last) print ""
        last = at[1]; $1 = ""; print }' | scripts/lengths_of_text.py --source '...' > bench/lengths/sentences.txt
"""

import argparse
import re
import sys

TOKEN = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
ENDS = (".", "?", "!")


def documents(lines):
    """The tokens of each document."""
    tokens = []
    for line in lines:
        if line.strip():
            tokens += TOKEN.findall(line)
        elif tokens:
            yield tokens
            tokens = []
    if tokens:
        yield tokens


def sentences(tokens):
    """The tokens of each sentence of a document."""
    sentence = []
    for token in tokens:
        sentence.append(token)
        if token in ENDS:
            yield sentence
            sentence = []
    if sentence:
        yield sentence


def main(words):
    parser = argparse.ArgumentParser(prog="scripts/lengths_of_text.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", action="store_true", help="of whole documents, not of sentences")
    parser.add_argument("--source", required=True, help="the text and where it is from, for the comment at the top")
    options = parser.parse_args(words)
    lengths = []
    for tokens in documents(sys.stdin):
        lengths += [len(tokens)] if options.documents else [len(sentence) for sentence in sentences(tokens)]
    if not lengths:
        parser.error("standard input: no tokens; a text is accepted")
    what = "documents" if options.documents else "sentences"
    print(f"# {len(lengths)} {what} of {options.source}.")
    print("# Tokens (words and punctuation marks) of each, in order, by scripts/lengths_of_text.py.")
    print(*lengths, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
