"""The fast engine: the meta-gradient of `learning.inner_loop`, by hand-written passes over the convolution stacks.

The network is taken as a sandwich. Outside are the two encoders and the decoder, nearly all of the work; each has four
passes written out: forward, backward, the tangent (how its outputs move when its parameters do) and the tangent of its
backward. Inside are the latents, AttFEX, the classifier and the losses, small and left to autograd.
"""
