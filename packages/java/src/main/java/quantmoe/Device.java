package quantmoe;

/** Where a model runs. */
public enum Device {
  /** The processor, which runs folders of {@code export --target cpu}. */
  CPU,
  /**
   * The first NVIDIA GPU, which runs folders of {@code export --target cuda}. It needs this library's artifact of the classifier {@code
   * linux-x86_64-cuda} or {@code windows-x86_64-cuda}, and {@code com.microsoft.onnxruntime:onnxruntime_gpu} instead of {@code onnxruntime}.
   */
  CUDA
}
