"""The vocoder (BigVGAN): 40 feature vectors per second to 32,000 samples per second."""

from torch import Tensor, nn

from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.filters import AliasFreeSnakeBeta
from comfyui_h3.h3core.models.audio_vae.weight_norm import WeightNormConv1d, WeightNormConvTranspose1d


class ResBlock(nn.Module):
    """Three residual pairs of convolutions, the first of each pair dilated by 1, 3, 5."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]):
        super().__init__()
        self.convs1 = nn.ModuleList(
            WeightNormConv1d(channels, channels, kernel, dilation=d, padding=(kernel - 1) * d // 2) for d in dilations
        )
        self.convs2 = nn.ModuleList(
            WeightNormConv1d(channels, channels, kernel, padding=(kernel - 1) // 2) for _ in dilations
        )
        self.activations = nn.ModuleList(AliasFreeSnakeBeta(channels) for _ in range(2 * len(dilations)))

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv1, conv2) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            x = x + conv2(self.activations[2 * i + 1](conv1(self.activations[2 * i](x))))
        return x


class Vocoder(nn.Module):
    """(B, latent_dim, A) -> (B, 1, hop_length * A), clamped to [-1, 1]."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        self.conv_pre = WeightNormConv1d(config.latent_dim, config.decoder_dim, 7, padding=3)
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        self.num_kernels = len(config.resblock_kernels)
        channels = config.decoder_dim
        for rate, kernel in zip(config.decoder_rates, config.decoder_kernels, strict=True):
            up = WeightNormConvTranspose1d(channels, channels // 2, kernel, rate)
            # A list of one: the checkpoint's names have this level.
            self.ups.append(nn.ModuleList([up]))
            channels //= 2
            self.resblocks.extend(ResBlock(channels, k, config.dilations) for k in config.resblock_kernels)
        self.activation_post = AliasFreeSnakeBeta(channels)
        self.conv_post = WeightNormConv1d(channels, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        for i, up in enumerate(self.ups):
            x = up[0](x)  # type: ignore[index]
            first = i * self.num_kernels
            total = self.resblocks[first](x)
            for block in self.resblocks[first + 1 : first + self.num_kernels]:
                total = total + block(x)
            x = total / self.num_kernels
        return self.conv_post(self.activation_post(x)).clamp(-1, 1)
