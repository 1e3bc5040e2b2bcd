import attention.ApiClient;
import attention.ApiException;
import attention.api.AttentionApi;
import attention.api.InferenceProtocolApi;
import attention.model.AttentionRequest;
import attention.model.ElementType;
import attention.model.EncodedTensor;
import attention.model.Encoding;
import attention.model.IncludedOutput;
import attention.model.InferenceInput;
import attention.model.InferenceRequest;
import attention.model.LinearMap;
import attention.model.Problem;
import attention.model.Projection;
import attention.model.TensorDatatype;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Base64;
import java.util.List;
import java.util.Map;

/** The generated client. The server's address is the first argument, the API key in API_KEY. */
public final class Example {
    private static final List<List<Double>> EYE = List.of(List.of(1.0, 0.0), List.of(0.0, 1.0));

    public static void main(String[] arguments) throws Exception {
        ApiClient client = new ApiClient();
        client.updateBaseUri(arguments[0]);
        client.setRequestInterceptor(request -> request.header("Authorization", "Bearer " + System.getenv("API_KEY")));
        AttentionApi api = new AttentionApi(client);

        AttentionRequest request = new AttentionRequest()
            .query(List.of(List.of(8.7, 3.2, 4.1), List.of(2.1, 9.9, 1.6)))
            .key(List.of(List.of(9.1, 1.0, 2.1), List.of(0.1, 7.5, 4.3), List.of(1.3, 5.5, 8.2), List.of(7.6, 2.4, 4.0),
                List.of(8.5, 2.7, 2.7)))
            .value(List.of(List.of(3.4, 1.3, 0.4, 9.8), List.of(7.5, 3.9, 4.1, 0.2), List.of(8.3, 2.8, 2.3, 0.1),
                List.of(1.6, 8.4, 9.9, 3.4), List.of(2.2, 9.4, 8.7, 1.1)));
        System.out.println(api.computeAttention(request).getOutput()); // lists print as in JSON

        var direct = api.computeAttention(new AttentionRequest().query(EYE).key(EYE)
            .value(List.of(List.of(1.0), List.of(2.0))).scale(0.0).include(List.of(IncludedOutput.SCORES)));
        same(direct.getOutput(), List.of(List.of(1.5), List.of(1.5)));
        same(direct.getScores(), EYE);
        same(direct.getMetadata().getNumHeads(), 1);

        LinearMap twice = new LinearMap().kernel(List.of(List.of(2.0, 0.0), List.of(0.0, 2.0)));
        var projected = api.computeAttention(
            new AttentionRequest().input(EYE).scale(0.0).projection(new Projection().value(twice)));
        same(projected.getOutput(), List.of(List.of(1.0, 1.0), List.of(1.0, 1.0)));

        var masked = api.computeAttention(
            new AttentionRequest().input(EYE).mask(List.of(List.of(true, false), List.of(false, true))));
        same(masked.getAttentionWeights(), EYE);

        ByteBuffer bytes = ByteBuffer.allocate(16).order(ByteOrder.LITTLE_ENDIAN);
        for (float number : new float[] {1, 0, 0, 1}) bytes.putFloat(number);
        EncodedTensor tensor = new EncodedTensor().dtype(ElementType.FLOAT32).shape(List.of(2, 2)).data(bytes.array());
        var typed = api.computeAttention(
            new AttentionRequest().input(tensor).scale(0.0).encoding(Encoding.BASE64));
        Map<?, ?> output = (Map<?, ?>) typed.getOutput();
        byte[] content = Base64.getDecoder().decode((String) output.get("data"));
        same(ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN).getFloat(12), 0.5f);

        try {
            api.computeAttention(request.key(request.getValue())); // four features, the query has three
            throw new AssertionError("no error");
        } catch (ApiException error) {
            Problem problem = client.getObjectMapper().readValue(error.getResponseBody(), Problem.class);
            same(error.getCode(), 422);
            switch (problem.getCode()) {
                case SHAPE_MISMATCH:
                    System.out.println(problem.getCode() + " " + problem.getErrors().get(0).getPointer());
                    break;
                default:
                    throw new AssertionError(problem.getDetail());
            }
        }

        InferenceInput input = new InferenceInput().name("input").shape(List.of(2, 2)).datatype(TensorDatatype.FP32)
            .data(List.of(1, 0, 0, 1));
        var inferred = new InferenceProtocolApi(client)
            .infer("attention", new InferenceRequest().inputs(List.of(input)).parameters(Map.of("scale", 0)));
        same(inferred.getOutputs().get(0).getData(), List.of(0.5, 0.5, 0.5, 0.5));
    }

    private static void same(Object got, Object expected) {
        if (!expected.equals(got)) throw new AssertionError(got + " instead of " + expected);
    }
}
