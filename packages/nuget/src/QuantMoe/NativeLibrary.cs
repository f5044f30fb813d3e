using System;
using System.Collections.Generic;
using System.Diagnostics.CodeAnalysis;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;

namespace Microsoft.ML.OnnxRuntime
{
    /// <summary>Registers the operators of exported models with ONNX Runtime.</summary>
    public static class QuantMoeSessionOptions
    {
        /// <summary>Register the operators of exported models for the sessions that these options make.</summary>
        /// <exception cref="DllNotFoundException">The package has no library for this platform.</exception>
        public static void RegisterQuantMoe(this SessionOptions options)
        {
            if (options == null) throw new ArgumentNullException(nameof(options));
            options.RegisterCustomOpLibrary(LibraryPath());
        }

        /// <summary>Return the path of the package's native library for this platform.</summary>
        /// <exception cref="DllNotFoundException">The package has no library for this platform.</exception>
        public static string LibraryPath() => PathOf("quantmoe_ort");

        /// <summary>Return the path of one of the package's native libraries for this platform.</summary>
        /// <exception cref="DllNotFoundException">The package has no such library for this platform.</exception>
        internal static string PathOf(string library)
        {
            string system = RuntimeInformation.IsOSPlatform(OSPlatform.Windows) ? "win"
                : RuntimeInformation.IsOSPlatform(OSPlatform.OSX) ? "osx" : "linux";
            string name = system == "win" ? library + ".dll" : "lib" + library + (system == "osx" ? ".dylib" : ".so");
            string platform = system + "-" + RuntimeInformation.ProcessArchitecture.ToString().ToLowerInvariant();
            string[] folders = Folders(Path.Combine("runtimes", platform, "native")).Where(folder => folder.Length > 0).ToArray();
            return folders.Select(folder => Path.Combine(folder, name)).FirstOrDefault(File.Exists)
                ?? throw new DllNotFoundException("QuantMoe has no " + name + " for " + platform + " in " + string.Join(", ", folders));
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
