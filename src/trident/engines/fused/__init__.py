"""The fast engine: the meta-gradient of `learning.inner_loop`, with hand-written passes over the convolution stacks.

The two encoders and the decoder are nearly all of the work. Each has four hand-written passes: forward, backward, the
tangent (the forward-mode derivative of the outputs) and the tangent of the backward pass. The latents, AttFEX, the
classifier and the losses are small and left to autograd.
"""
