"""What Hugging Face answers, greedy: ``python -m scripts.gpu.reference FOLDER DTYPE`` reads ``{"prompts": [[id]],
"new_tokens": N}`` and prints the new tokens of each prompt."""

from __future__ import annotations

import json
import sys


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder, dtype = sys.argv[1:]
    work = json.load(sys.stdin)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    model.generation_config.eos_token_id = None
    answers = []
    with torch.no_grad():
        for prompt in work["prompts"]:
            ids = torch.tensor([prompt], device=device)
            out = model.generate(ids, max_new_tokens=work["new_tokens"], do_sample=False, pad_token_id=0)
            answers.append(out[0, len(prompt) :].tolist())
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
