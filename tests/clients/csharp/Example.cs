using System;
using System.Collections.Generic;
using Attention.Api;
using Attention.Client;
using Attention.Model;
using Newtonsoft.Json;
using Newtonsoft.Json.Linq;

/// <summary>The generated client. The server's address is the first argument, the API key in API_KEY.</summary>
public static class Example
{
    public static void Main(string[] arguments)
    {
        var key = Environment.GetEnvironmentVariable("API_KEY");
        var api = new AttentionApi(new Configuration { BasePath = arguments[0], AccessToken = key });
        var request = new AttentionRequest(
            query: Matrix(new[] { 8.7, 3.2, 4.1 }, new[] { 2.1, 9.9, 1.6 }),
            key: Matrix(new[] { 9.1, 1.0, 2.1 }, new[] { 0.1, 7.5, 4.3 }, new[] { 1.3, 5.5, 8.2 },
                new[] { 7.6, 2.4, 4.0 }, new[] { 8.5, 2.7, 2.7 }),
            value: Matrix(new[] { 3.4, 1.3, 0.4, 9.8 }, new[] { 7.5, 3.9, 4.1, 0.2 }, new[] { 8.3, 2.8, 2.3, 0.1 },
                new[] { 1.6, 8.4, 9.9, 3.4 }, new[] { 2.2, 9.4, 8.7, 1.1 }));
        var rows = api.ComputeAttention(request).Output.GetList(); // unless `encoding` asks for base64
        var first = (double)((JArray)rows[0])[1];
        if (first < 8.02 || first > 8.03) throw new Exception($"{first}");
        Console.WriteLine(JsonConvert.SerializeObject(rows));

        request.Key = request.Value; // four features, the query has three
        try
        {
            api.ComputeAttention(request);
            throw new Exception("no error");
        }
        catch (ApiException error)
        {
            var problem = JsonConvert.DeserializeObject<Problem>((string)error.ErrorContent);
            switch (problem.Code)
            {
                case ProblemCode.ShapeMismatch:
                    Console.WriteLine($"shape_mismatch {problem.Errors[0].Pointer}");
                    break;
                default:
                    throw new Exception(problem.Detail);
            }
        }
    }

    private static Tensor Matrix(params double[][] rows) => new Tensor(new List<object>(rows));
}
