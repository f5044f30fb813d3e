namespace QuantMoe
{
    /// <summary>Where a model runs.</summary>
    public enum Device
    {
        /// <summary>The processor, which runs folders of <c>export --target cpu</c>.</summary>
        Cpu,

        /// <summary>
        /// The first NVIDIA GPU, which runs folders of <c>export --target cuda</c>. It needs the packages QuantMoe.Cuda and
        /// Microsoft.ML.OnnxRuntime.Gpu.Linux, or on Windows Microsoft.ML.OnnxRuntime.Gpu.Windows.
        /// </summary>
        Cuda,
    }
}
