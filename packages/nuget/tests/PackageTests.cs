using System;
using System.IO;
using System.Reflection;
using System.Runtime.Loader;
using Microsoft.ML.OnnxRuntime;
using Xunit;

namespace QuantMoe.Tests;

public class PackageTests
{
    [Fact]
    public void APluginFindsItsOwnLibrary()
    {
        using var folder = new Temporary();
        string own = folder["runtimes/linux-x64/native/libquantmoe_ort.so"];
        Directory.CreateDirectory(Path.GetDirectoryName(own)!);
        File.Copy(QuantMoeSessionOptions.LibraryPath(), own);
        File.Copy(typeof(Generator).Assembly.Location, folder["QuantMoe.dll"]);
        var context = new AssemblyLoadContext("plugin", isCollectible: true);
        Type options = context.LoadFromAssemblyPath(folder["QuantMoe.dll"]).GetType(typeof(QuantMoeSessionOptions).FullName!)!;
        Assert.Equal(own, options.GetMethod("LibraryPath", BindingFlags.Public | BindingFlags.Static)!.Invoke(null, [0]));
        context.Unload();
    }
}
