"""An extension of your own: the microbatch with the largest gradient of each update. python examples/extension.py"""

import calendar
import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import Extension, GradientAccumulator, losses


class LargestGradient(Extension):
    before, norms, largest = 0.0, (), ()

    def surround_steps(self, steps, call):
        trained = [parameter for parameter in call.model.parameters() if parameter.requires_grad]
        for step in steps:
            yield step  # its forward and backward run here; under DDP, the last of a call sums over ranks
            after = torch.cat([parameter.grad.flatten() for parameter in trained])
            self.norms += (float((after - self.before).norm()),)
            self.before = after

    def after_finalize(self, gradient, update):
        self.largest += (max(self.norms, default=0.0),)
        print(f"the largest gradient of {len(self.norms)} microbatches has the norm {self.largest[-1]:.4f}")
        self.after_drop(gradient)

    def after_drop(self, gradient):  # a call failed, or discard(): its samples come again
        self.before, self.norms = 0.0, ()

    def state_dict(self):
        return {"largest_gradients": self.largest}  # in gradient.state_dict()

    def load_state_dict(self, gradient, state):
        self.largest = state.pop("largest_gradients")


texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
samples = [{"input_ids": text, "labels": text} for text in texts]
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
gradient = GradientAccumulator(model, max_microbatch_tokens=2048, extensions=[LargestGradient()])
for first in range(0, 48, 16):
    gradient.forward_backward(samples[first : first + 16], losses.next_token)
    gradient.finalize()
