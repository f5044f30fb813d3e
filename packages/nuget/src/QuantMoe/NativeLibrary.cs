using System;
using System.Collections.Generic;
using System.Diagnostics.CodeAnalysis;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using QuantMoe;

namespace Microsoft.ML.OnnxRuntime
{
    /// <summary>Registers the operators of exported models with ONNX Runtime.</summary>
    public static class QuantMoeSessionOptions
    {
        /// <summary>Register the operators of exported models for the sessions that these options make.</summary>
        /// <param name="options">The options.</param>
        /// <param name="device">Where the model runs. For a GPU, ONNX Runtime's CUDA provider is appended, too.</param>
        /// <exception cref="DllNotFoundException">The package has no library for this platform, or QuantMoe.Cuda is missing.</exception>
        /// <exception cref="NotSupportedException">This ONNX Runtime has no CUDA provider.</exception>
        public static void RegisterQuantMoe(this SessionOptions options, Device device = Device.Cpu)
        {
            if (options == null) throw new ArgumentNullException(nameof(options));
            string library = LibraryPath(device);
            if (device == Device.Cuda)
            {
                if (!OrtEnv.Instance().GetAvailableProviders().Contains("CUDAExecutionProvider"))
                    throw new NotSupportedException(
                        "this ONNX Runtime has no CUDA provider; add the package Microsoft.ML.OnnxRuntime.Gpu."
                        + (RuntimeInformation.IsOSPlatform(OSPlatform.Windows) ? "Windows" : "Linux"));
                options.AppendExecutionProvider_CUDA();
            }
            options.RegisterCustomOpLibrary(library);
        }

        /// <summary>Return the path of the package's native library for this platform.</summary>
        /// <param name="device">Where the model runs. The library for GPUs is in the package QuantMoe.Cuda.</param>
        /// <exception cref="DllNotFoundException">The package has no library for this platform, or QuantMoe.Cuda is missing.</exception>
        public static string LibraryPath(Device device = Device.Cpu) => device == Device.Cuda
            ? PathOf("quantmoe_ort_cuda", "; the package QuantMoe.Cuda has libraries for GPUs") : PathOf("quantmoe_ort");

        /// <summary>Return the path of one of the package's native libraries for this platform.</summary>
        /// <exception cref="DllNotFoundException">The package has no such library for this platform.</exception>
        internal static string PathOf(string library, string wayOut = "")
        {
            string system = RuntimeInformation.IsOSPlatform(OSPlatform.Windows) ? "win"
                : RuntimeInformation.IsOSPlatform(OSPlatform.OSX) ? "osx" : "linux";
            string name = system == "win" ? library + ".dll" : "lib" + library + (system == "osx" ? ".dylib" : ".so");
            string platform = system + "-" + RuntimeInformation.ProcessArchitecture.ToString().ToLowerInvariant();
            string[] folders = Folders(Path.Combine("runtimes", platform, "native")).Where(folder => folder.Length > 0).ToArray();
            return folders.Select(folder => Path.Combine(folder, name)).FirstOrDefault(File.Exists)
                ?? throw new DllNotFoundException("QuantMoe has no " + name + " for " + platform + " in " + string.Join(", ", folders) + wayOut);
        }

        // Beside this assembly first: a plugin's folder is none of its host's. Then where .NET's host or a publish has laid it.
        [UnconditionalSuppressMessage("SingleFile", "IL3000", Justification = "An empty location is skipped.")]
        static IEnumerable<string> Folders(string runtimes)
        {
            string own = Path.GetDirectoryName(typeof(QuantMoeSessionOptions).Assembly.Location) ?? "";
            if (own != "")
            {
                yield return own;
                yield return Path.Combine(own, runtimes);
                yield return Path.GetFullPath(Path.Combine(own, "..", "..", runtimes)); // of lib/FRAMEWORK in NuGet's cache
            }
            string hosts = AppContext.GetData("NATIVE_DLL_SEARCH_DIRECTORIES") as string ?? "";
            foreach (string folder in hosts.Split(Path.PathSeparator)) yield return folder;
            yield return AppContext.BaseDirectory;
        }
    }
}

#if !NET
namespace System.Diagnostics.CodeAnalysis
{
    [AttributeUsage(AttributeTargets.Method)]
    sealed class UnconditionalSuppressMessageAttribute : Attribute
    {
        public UnconditionalSuppressMessageAttribute(string category, string id)
        {
        }

        public string? Justification { get; set; }
    }
}
#endif
