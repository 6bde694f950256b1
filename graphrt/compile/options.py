from graphrt.core.compile_options import CompileOptions as CompileOptions
