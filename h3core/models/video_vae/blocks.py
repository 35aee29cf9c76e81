"""The convolutional encoder and its blocks: causal in time, mirrored at the borders of a frame."""

from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig

EPS = 1e-6
NORM_GROUPS = 32


def pad_time(x: Tensor) -> Tensor:
    """Two zero frames in front of (B, C, T, H, W): the state of every clip starts empty."""
    return F.pad(x, (0, 0, 0, 0, 2, 0))


class CausalConv3d(nn.Conv3d):
    """3 x 3 x 3, of stride 1: no frame sees a later one; (B, C, T, H, W) with H, W >= 2, sizes kept."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_time(F.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect")))


class FrameGroupNorm(nn.GroupNorm):
    """Group norm whose statistics are those of one frame."""

    def __init__(self, channels: int):
        super().__init__(NORM_GROUPS, channels, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.transpose(1, 2)  # (B, T, C, H, W)
        normed = super().forward(frames.flatten(0, 1).unsqueeze(2))  # (B*T, C, 1, H, W)
        return normed.squeeze(2).unflatten(0, frames.shape[:2]).transpose(1, 2)


class ResBlock(nn.Module):
    """Two convolutions, each after norm and SiLU; where the width changes the shortcut is a 1 x 1 x 1 convolution."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1 = FrameGroupNorm(in_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = FrameGroupNorm(out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.nin_shortcut = nn.Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return (x if self.nin_shortcut is None else self.nin_shortcut(x)) + y


class Downsample(nn.Module):
    """(B, C, T, H, W) -> (B, C, (T - 1) // time + 1, H / space, W / space); H, W even where space is 2."""

    def __init__(self, channels: int, space: int, time: int):
        super().__init__()
        self.space = space
        self.conv = nn.Conv3d(channels, channels, 3, stride=(time, space, space))

    def forward(self, x: Tensor) -> Tensor:
        # Only right and bottom, so that pixel 2i stays under output i. A level that does not halve the frame has no
        # border at all: the released sizes have none such.
        if self.space == 2:
            x = F.pad(x, (0, 1, 0, 1, 0, 0), mode="reflect")
        return self.conv(pad_time(x))


class Level(nn.Module):
    """``num_res_blocks`` residual blocks of one width, then the downsampling, if the level has one."""

    def __init__(self, in_channels: int, channels: int, num_res_blocks: int, space: int, time: int):
        super().__init__()
        self.block = nn.ModuleList(
            ResBlock(in_channels if i == 0 else channels, channels) for i in range(num_res_blocks)
        )
        self.downsample = Downsample(channels, space, time) if space * time > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class ConvEncoder(nn.Module):
    """Normalised pixels (B, 3, T, H, W) -> features (B, 48, T', H / 16, W / 16), T' = 5, 2, 1 for T = 17, 5, 1."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        widths = [config.ch * mult for mult in config.ch_mult]
        self.conv_in = CausalConv3d(config.pixel_channels, config.ch)
        self.down = nn.ModuleList(
            Level(before, width, config.num_res_blocks, space, time)
            for before, width, space, time in zip(
                [config.ch, *widths[:-1]], widths, config.space_down, config.time_down, strict=True
            )
        )
        self.norm_out = FrameGroupNorm(widths[-1])
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))
