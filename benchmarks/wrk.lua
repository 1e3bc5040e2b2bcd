-- Sends the same POST body again and again: wrk -s wrk.lua URL -- BODY_FILE. The last line of its output is JSON.

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
end

function done(summary)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "microseconds": %d, "errors": {"connect": %d, "read": %d, "write": %d, "timeout": %d, "status": %d}}\n',
    summary.requests, summary.duration, errors.connect, errors.read, errors.write, errors.timeout, errors.status))
end
