"""An extension of your own: the largest gradient of each microbatch. python examples/extension.py"""

import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import Extension, GradientAccumulator, losses


class LargestGradient(Extension):
    before, largest = 0.0, ()

    def surround_steps(self, steps, call):
        for step in steps:
            yield step  # its forward and backward run here; under DDP, the last of a call sums over ranks
            after = torch.cat([parameter.grad.flatten() for parameter in call.model.parameters()])
            self.largest += (float((after - self.before).abs().max()),)
            self.before = after

    def after_drop(self, gradient):  # a call failed, or discard(): its samples come again
        self.before, self.largest = 0.0, ()


texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(inspect).split("\n\n")[:16]]
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
extension = LargestGradient()
gradient = GradientAccumulator(model, max_microbatch_tokens=2048, extensions=[extension])
gradient.forward_backward([{"input_ids": text, "labels": text} for text in texts], losses.next_token)
print(gradient.finalize(), extension.largest, sep="\n")
