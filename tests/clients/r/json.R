# Requests and answers in JSON as R's jsonlite writes and reads them.
#   Rscript json.R write    prints a line for each request: its name, a tab, its body
#   Rscript json.R read     reads an answer from standard input, and prints the numbers of its output, row by row
library(jsonlite)

eye <- diag(2)

# jsonlite keeps 15 digits: the bytes of an array keep all. R has columns first, the service rows.
exact <- function(x) {
  list(dtype = "float64", shape = dim(x), data = base64_enc(writeBin(as.vector(t(x)), raw())))
}

numbers <- function(x) matrix(readBin(base64_dec(x$data), "double", prod(x$shape)), x$shape[1], byrow = TRUE)

requests <- list(
  # Every value is an array: "is_causal":[true], "include":["scores"].
  causal = toJSON(list(input = eye, scale = 1, num_heads = 1, is_causal = TRUE, include = "attention_weights")),
  window = toJSON(list(input = eye, scale = 1L, window = list(left = 0L), layout = "ld", backend = "numpy")),
  # Minus infinity is null, which hides a key.
  bias = toJSON(list(input = eye, scale = 1, bias = matrix(c(0, 0, -Inf, 0), 2)), na = "null"),
  text = toJSON(list(input = eye, scale = 1, bias = matrix(c(0, 0, -Inf, 0), 2))),
  digits = toJSON(list(input = eye, scale = 1 / 3), digits = NA),
  exact = toJSON(list(query = eye, key = eye, value = exact(eye / 3), scale = 1, encoding = "base64")),
  unboxed = toJSON(list(input = eye, scale = 1, is_causal = TRUE), auto_unbox = TRUE),
  columns = toJSON(list(query = matrix(1, 3, 1), key = matrix(1, 1, 1), value = matrix(2, 1, 1))),
  protocol = toJSON(auto_unbox = TRUE, list(
    inputs = list(list(name = "input", shape = dim(eye), datatype = "FP64", data = eye)),
    parameters = list(scale = 1, is_causal = TRUE)
  ))
)

if (commandArgs(TRUE) == "write") {
  cat(paste(names(requests), requests, sep = "\t"), sep = "\n")
  cat("version", as.character(packageVersion("jsonlite")), sep = "\t")
} else {
  answer <- fromJSON(file("stdin"))
  output <- if (is.list(answer$output)) numbers(answer$output) else answer$output
  cat(sprintf("%.17g", t(output)), sep = "\n")
}
