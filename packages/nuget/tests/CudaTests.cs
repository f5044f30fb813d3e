using System;
using System.IO;
using Microsoft.ML.OnnxRuntime;
using Xunit;

namespace QuantMoe.Tests;

/// <summary>What a folder for GPUs needs is named where it is missing. No test has a GPU.</summary>
public class CudaTests
{
    [Fact]
    public void AFolderForGpusIsRefusedOnTheCpu()
    {
        var error = Assert.Throws<NotSupportedException>(() => new Generator(Models.Cuda));
        Assert.Equal($"{Models.Cuda}: exported for NVIDIA GPUs; open it with Device.Cuda, or export it with --target cpu", error.Message);
    }

    [Fact]
    public void ThePackageIsNamed()
    {
        var error = Assert.Throws<DllNotFoundException>(() => new Generator(Models.Cuda, device: Device.Cuda));
        Assert.StartsWith("QuantMoe has no libquantmoe_ort_cuda.so for linux-", error.Message);
        Assert.EndsWith("; the package QuantMoe.Cuda has libraries for GPUs", error.Message);
    }

    [Fact]
    public void TheProviderIsNamed()
    {
        string library = Path.Combine(AppContext.BaseDirectory, "libquantmoe_ort_cuda.so");
        File.WriteAllBytes(library, []);
        try
        {
            Assert.Equal(library, QuantMoeSessionOptions.LibraryPath(Device.Cuda));
            var error = Assert.Throws<NotSupportedException>(() => new Generator(Models.Cuda, device: Device.Cuda));
            Assert.Equal("this ONNX Runtime has no CUDA provider; add the package Microsoft.ML.OnnxRuntime.Gpu.Linux", error.Message);
        }
        finally
        {
            File.Delete(library);
        }
    }
}
